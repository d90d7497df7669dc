"""`mlx-troupe connect`: what is written into other programs' files, and that it comes out again."""

import json
import os
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_troupe.api.cli import main
from mlx_troupe.api.clients import CLIENTS, Target
from mlx_troupe.api.config_edit import JsonEdit, toml_edit, yaml_edit, yaml_item_edit
from mlx_troupe.api.edits import EditRefused

TARGET = Target(url="http://127.0.0.1:8000", model="org/model", keyed=False)
KEYED = Target(url="http://127.0.0.1:8000", model="org/model", keyed=True)
PARSERS = {"json": json.loads, "toml": tomllib.loads, "yml": yaml.safe_load, "yaml": yaml.safe_load}
# A file of each client's as somebody may have it.
OWN = {
    "claude-code": '{\n    "permissions": {"allow": ["Bash"]},\n    "env": {"ANTHROPIC_MODEL": "mine", "X": "ü"}\n}',
    "codex": (
        '# mine\nmodel = "gpt-5" # best\nmodel_provider="openai"\napproval_policy = "never"\n\n'
        '[model_providers.other]\nname = "model = x"\n[projects."/a b"]\ntrust_level = "trusted"'
    ),
    "aider": "# mine\nmodel: sonnet  # best\ndark-mode: true\nread:\n  - model.md\n",
    "opencode": '{"$schema": "https://opencode.ai/config.json", "model": "a/b", "provider": {"a": {"name": "A"}}}',
    "continue": (
        "name: Mine\nversion: 1.0.0\nschema: v1\nmodels: # all of them\n\n    # the first\n"
        "    - name: a\n      provider: openai\n      model: x\nrules:\n  - be brief\n"
    ),
}


def path_of(client, home):
    return CLIENTS[client](TARGET, {"HOME": str(home)}).path


def meaning(path, text=None):
    return PARSERS[path.suffix[1:]](path.read_text() if text is None else text) or {}


@pytest.fixture
def connect(tmp_path):
    def call(*arguments, **environment):
        return main(["connect", *arguments], environment={"HOME": str(tmp_path), **environment})

    call.home = tmp_path
    return call


@pytest.mark.parametrize("client", CLIENTS)
def test_write_and_undo_of_a_new_file(connect, client, capsys):
    path = path_of(client, connect.home)
    assert connect(client, "--write", "--model", "org/model") == 0
    assert "org/model" in path.read_text()
    assert "http://127.0.0.1:8000" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert connect(client, "--undo") == 0
    assert [found for found in connect.home.rglob("*") if found.is_file()] == []
    assert connect(client, "--undo") == 1


@pytest.mark.parametrize("client", CLIENTS)
def test_write_keeps_what_was_there_and_undo_gives_every_byte_back(connect, client):
    path = path_of(client, connect.home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OWN[client])
    path.chmod(0o640)
    assert connect(client, "--write", "--model", "org/model") == 0
    assert path.stat().st_mode & 0o777 == 0o640
    assert connect(client, "--write", "--model", "org/other", "--url", "http://127.0.0.1:9000/v1/") == 0
    text = path.read_text()
    assert "org/other" in text
    assert "org/model" not in text
    assert "127.0.0.1:8000" not in text
    if path.suffix != ".json":
        assert text.count("# >>> mlx-troupe") == text.count("# <<< mlx-troupe") <= 2
        assert all(line in text for line in OWN[client].splitlines())
    assert connect(client, "--undo") == 0
    assert path.read_text() == OWN[client]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("client", CLIENTS)
def test_undo_keeps_what_changed_since(connect, client):
    """Clients write their own files too: permissions, trusted projects."""
    path = path_of(client, connect.home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OWN[client])
    before = meaning(path)
    assert connect(client, "--write", "--model", "org/model") == 0
    if path.suffix == ".json":
        path.write_text(json.dumps(meaning(path) | {"added": 1}))
    else:
        with path.open("a") as file:
            file.write({".toml": "[added]\nx = 1\n"}.get(path.suffix, "added: 1\n"))
    assert connect(client, "--undo") == 0
    after = meaning(path)
    assert after.pop("added") in (1, {"x": 1})
    assert after == before


@pytest.mark.parametrize("client", CLIENTS)
def test_undo_without_write_changes_nothing(connect, client, capsys):
    path = path_of(client, connect.home)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OWN[client])
    assert connect(client, "--undo") == 1
    assert path.read_text() == OWN[client]
    assert "nothing of mlx-troupe's" in capsys.readouterr().err


@pytest.mark.parametrize("client", CLIENTS)
def test_printing_writes_nothing(connect, client, capsys):
    assert connect(client, "--model", "org/model") == 0
    shown = capsys.readouterr()
    assert "org/model" in shown.out
    assert "--write" in shown.err
    assert [*connect.home.iterdir()] == []


def test_what_each_client_reads(tmp_path):
    def written(client, target):
        plan = CLIENTS[client](target, {"HOME": str(tmp_path)})
        return meaning(plan.path, plan.edit.apply(None))

    environment = written("claude-code", TARGET)["env"]
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert {environment[name] for name in environment if name.endswith("_MODEL")} == {"org/model"}
    assert written("codex", TARGET) == {
        "model": "org/model",
        "model_provider": "mlx_troupe",
        "model_providers": {
            "mlx_troupe": {"name": "mlx-troupe", "base_url": "http://127.0.0.1:8000/v1", "wire_api": "responses"}
        },
    }
    assert written("aider", TARGET)["model"] == "openai/org/model"
    assert written("opencode", TARGET)["model"] == "mlx-troupe/org/model"
    assert written("continue", TARGET)["models"][0]["apiBase"] == "http://127.0.0.1:8000/v1"
    # With keys each names a variable, and none holds a key.
    assert written("claude-code", KEYED)["apiKeyHelper"] == "printenv MLX_TROUPE_CLIENT_KEY"
    assert written("codex", KEYED)["model_providers"]["mlx_troupe"]["env_key"] == "MLX_TROUPE_CLIENT_KEY"
    assert "openai-api-key" not in written("aider", KEYED)
    options = written("opencode", KEYED)["provider"]["mlx-troupe"]["options"]
    assert options["apiKey"] == "{env:MLX_TROUPE_CLIENT_KEY}"
    assert written("continue", KEYED)["models"][0]["apiKey"] == "${{ secrets.MLX_TROUPE_CLIENT_KEY }}"


BROKEN = {
    "json": [
        '{"a": 1',
        "[]",
        '{"env": []}',
        '{"provider": 1, "env": "x"}',
        '// c\n{"a": 1}',
        '{"a": 1, "a": 2}',
        "[" * 99999,
    ],
    "toml": ["a = ", "[model_providers.mlx_troupe]\nname = 'x'\n", "model_providers = 1\n", "model = '''\na\n'''\n"],
    "yaml": ["a: [", "- a\n", "models: 1\n", "{name: x, models: []}\n", "a: 1\n---\nb: 2\n", "models: [{name: a}]\n"],
    "yml": ["a: [", "- a\n", "{model: x}\n", "model:\n  - a\n", "a: 1\n...\n---\nb: 2\n"],
}
BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)


@pytest.mark.parametrize("client", CLIENTS)
def test_files_that_cannot_be_edited_safely_are_left_alone(connect, client, capsys):
    path = path_of(client, connect.home)
    path.parent.mkdir(parents=True, exist_ok=True)
    bombs = [BOMB] if path.suffix in (".yml", ".yaml") else []
    for bad in (*(text.encode() for text in [*BROKEN[path.suffix[1:]], *bombs]), b"\xff\xfe", b"x" * (5 << 20)):
        path.write_bytes(bad)
        code = connect(client, "--write", "--model", "org/model")
        if code == 0:  # this one could be: what it meant is still there
            assert bad in (b'{"provider": 1, "env": "x"}', b'{"env": []}', b"model_providers = 1\n"), bad[:80]
            assert meaning(path) | meaning(path, bad.decode()) is not None
            connect(client, "--undo")
        assert path.read_bytes() == bad
        assert os.listdir(path.parent) == [path.name], bad[:80]
        assert "Traceback" not in capsys.readouterr().err


def test_links_and_modes(connect, capsys):
    path = path_of("codex", connect.home)
    path.parent.mkdir()
    real = connect.home / "dotfiles"
    real.mkdir()
    (real / "codex.toml").write_text("a = 1\n")
    path.symlink_to(real / "codex.toml")
    victim = connect.home / "victim"
    victim.write_text("precious")
    path.with_name("config.toml.before-mlx-troupe").symlink_to(victim)
    assert connect("codex", "--write", "--model", "m") == 1  # the copy is no copy of ours: it cannot be undone
    path.with_name("config.toml.before-mlx-troupe").unlink()
    assert connect("codex", "--write", "--model", "m") == 0
    assert path.is_symlink()
    assert "mlx_troupe" in (real / "codex.toml").read_text()
    assert connect("codex", "--undo") == 0
    assert (real / "codex.toml").read_text() == "a = 1\n"
    assert victim.read_text() == "precious"
    path.unlink()
    path.symlink_to(connect.home / "nowhere")
    assert connect("codex", "--write", "--model", "m") == 1
    assert not (connect.home / "nowhere").exists()
    path.unlink()
    path.mkdir()
    assert connect("codex", "--write", "--model", "m") == 1
    path.rmdir()
    path.write_text("a = 1\n")
    path.chmod(0o444)
    assert connect("codex", "--write", "--model", "m") == 1
    assert path.read_text() == "a = 1\n"
    assert "read-only" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "127.0.0.1:8000",
        "http://",
        "http://a:b@h",
        "http://h?x",
        "http://h\n",
        "http://h:99999",
        "http://h #",
    ],
)
def test_addresses_that_are_none(connect, url):
    assert connect("codex", "--url", url, "--model", "m", "--write") == 2
    assert [*connect.home.iterdir()] == []


def test_odd_model_names_cannot_break_out(connect):
    for name in ('a"b', "a\\b", "a: b # c", "{{x}}", "]", "%s", "ünï", "'"):
        for client in CLIENTS:
            assert connect(client, "--write", "--model", name) == 0
            assert name in json.dumps(meaning(path_of(client, connect.home)), ensure_ascii=False).replace(
                '\\"', '"'
            ).replace("\\\\", "\\")
    for name in ("a\nb", "a\x1b[0m", "", "x" * 201):
        assert connect("codex", "--write", "--model", name) == 2


class Models(BaseHTTPRequestHandler):
    answer = (200, b'{"data": [{"id": "org/served"}]}')
    key = ""
    seen: ClassVar[list[str]] = []

    def do_GET(self):
        self.seen.append(self.headers.get("Authorization", ""))
        status, body = self.answer
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            status, body = 401, b""
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Models,), {"seen": []})
    with HTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        handler.url = f"http://127.0.0.1:{found.server_port}"
        yield handler
        found.shutdown()
        thread.join()


def test_the_server_says_which_model_and_whether_it_wants_a_key(connect, server, capsys):
    assert connect("opencode", "--url", server.url, "--write") == 0
    path = path_of("opencode", connect.home)
    assert meaning(path)["model"] == "mlx-troupe/org/served"
    assert "unused" in path.read_text()
    server.key = "a-secret-key"
    assert connect("opencode", "--url", server.url, "--write") == 2
    assert "wants a key" in capsys.readouterr().err
    assert connect("opencode", "--url", server.url, "--write", MLX_TROUPE_CLIENT_KEY="a-secret-key") == 0
    assert "{env:MLX_TROUPE_CLIENT_KEY}" in path.read_text()
    assert not any(b"a-secret-key" in found.read_bytes() for found in connect.home.rglob("*") if found.is_file())
    shown = capsys.readouterr()
    assert "a-secret-key" not in shown.out + shown.err


@pytest.mark.parametrize(
    "answer", [(302, b""), (500, b""), (200, b"<html>"), (200, b"[]"), (200, b'{"data": [{"id": 5}]}')]
)
def test_servers_that_are_something_else(connect, server, answer):
    server.answer = answer
    assert connect("codex", "--url", server.url, "--write") == 2
    assert [*connect.home.iterdir()] == []


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=8)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(WORDS | st.sampled_from(["env", "model"]), TREES, max_size=4))
def test_any_json_survives(document):
    edit = JsonEdit({("env", "A"): "1", ("model",): "m"})
    text = json.dumps(document)
    try:
        new = edit.apply(text)
    except EditRefused:
        assert not isinstance(document["env"], dict)
        return
    expected = document | {"env": document.get("env", {}) | {"A": "1"}, "model": "m"}
    assert json.loads(new) == expected
    assert edit.undo(new, text) == text


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(WORDS | st.sampled_from(["models", "model"]), TREES, max_size=4), st.booleans())
def test_any_yaml_survives_or_is_refused(document, flow):
    text = yaml.safe_dump(document, allow_unicode=True, default_flow_style=flow)
    for edit, key in ((yaml_edit({"model": "m"}), "model"), (yaml_item_edit("models", {"name": "n"}, {}), "models")):
        try:
            new = edit.apply(text)
        except EditRefused:
            continue
        assert {name: value for name, value in yaml.safe_load(new).items() if name != key} == {
            name: value for name, value in document.items() if name != key
        }
        assert edit.undo(new, text) == text


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(OWN["codex"].splitlines()), unique=True))
def test_any_toml_survives_or_is_refused(lines):
    text = "\n".join(lines)
    edit = toml_edit({"model": "m"}, ("model_providers", "mlx_troupe"), {"name": "n"})
    old = tomllib.loads(text)
    new = edit.apply(text)
    found = tomllib.loads(new)
    assert found.pop("model") == "m"
    assert found["model_providers"].pop("mlx_troupe") == {"name": "n"}
    old.pop("model", None)
    assert found == old | {"model_providers": old.get("model_providers", {})}
    assert edit.undo(new, text) == text


def test_the_readme_names_every_client():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert all(client in readme for client in CLIENTS)
