"""`mlx-troupe cache`, over a real folder."""

from __future__ import annotations

import json

from mlx_troupe.api.cli import main
from mlx_troupe.runtime.disk import DiskTier
from tests.disk.pages import ROOT, blob, records


def fill(top, root: str = ROOT) -> DiskTier:
    tier = DiskTier(top, root, 1 << 30, about="tiny")
    tier.open()
    for record in records(list(range(12))):
        tier.write(record, blob(record.chain))
    return tier


def run(top, verb: str, *more: str) -> int:
    return main(["cache", verb, "--cache-dir", str(top), *more], environment={})


def test_info_says_what_is_there(tmp_path, capsys) -> None:
    assert run(tmp_path / "none", "info") == 0
    assert "no prefixes on this disk" in capsys.readouterr().err
    fill(tmp_path).close()
    assert run(tmp_path, "info") == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:2] == ["tiny", "3"]
    assert "idle" in line
    assert run(tmp_path, "info", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pages"], found["in_use"]) == (3, False)


def test_verify_fails_on_damage_and_names_it(tmp_path, capsys) -> None:
    fill(tmp_path).close()
    assert run(tmp_path, "verify") == 0
    capsys.readouterr()
    path = sorted((tmp_path / ROOT[:32]).glob("*.page"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    assert run(tmp_path, "verify") == 1
    said = capsys.readouterr()
    assert f"damaged: {path.name}" in said.err
    assert "damaged" in said.out


def test_clear_frees_what_no_server_uses(tmp_path, capsys) -> None:
    fill(tmp_path).close()
    live = fill(tmp_path, "b" * 64)
    assert run(tmp_path, "clear") == 1
    said = capsys.readouterr()
    assert said.out.startswith("freed ")
    assert "in use by a server" in said.err
    assert not (tmp_path / ROOT[:32]).exists()
    live.close()
    assert run(tmp_path, "clear", "--json") == 0
    assert json.loads(capsys.readouterr().out)["freed_bytes"] > 3 * 4096
