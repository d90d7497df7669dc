"""The disk tier against a hostile world: every fault is a miss, never an exception of a read or a wrong byte."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time

import pytest

from mlx_troupe.runtime.disk import DiskTier, DiskUnusable, clear, reports, verify
from mlx_troupe.runtime.disk.folders import folder_bytes
from mlx_troupe.runtime.prefix_page import root_chain
from tests.disk.pages import ROOT, blob, content, records

TOKENS = list(range(12))
FILE_BYTES = 8192


class FailAt:
    """Raises at a point."""

    def __init__(self, point: str, error: Exception) -> None:
        self.point: str | None = point
        self._error = error

    def reached(self, point: str, /) -> None:
        if point == self.point:
            raise self._error


def opened(top, root: str = ROOT, budget: int = 1 << 30, **more) -> DiskTier:
    tier = DiskTier(top, root, budget, **more)
    tier.open()
    return tier


def filled(top, root: str = ROOT, tokens: list[int] = TOKENS) -> list[bytes]:
    """Write a prompt's pages and leave; their chains."""
    tier = opened(top, root)
    for record in records(tokens):
        tier.write(record, blob(record.chain))
    tier.close()
    return [record.chain for record in records(tokens)]


def listed(top, root: str = ROOT, budget: int = 1 << 30) -> list[bytes]:
    tier = DiskTier(top, root, budget)
    found = [record.chain for record in tier.open()[0]]
    tier.close()
    return found


def test_pages_survive_and_come_back_parents_first(tmp_path) -> None:
    chains = filled(tmp_path)
    tier = DiskTier(tmp_path, ROOT, 1 << 30)
    found, budget = tier.open()
    assert [record.chain for record in found] == chains
    assert budget == 1 << 30
    for record in found:
        page = tier.fetch(record.chain)
        assert page is not None
        assert page.layout == blob(record.chain).layout
        assert b"".join(page.buffers) == content(record.chain)
        assert record.file_bytes == (tier.folder / f"{record.chain.hex()}.page").stat().st_size
    tier.close()


def test_files_and_folders_are_private(tmp_path) -> None:
    top = tmp_path / "prefixes"
    before = os.umask(0)
    try:
        filled(top)
    finally:
        os.umask(before)
    for path in (top, *top.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "swap", "append", "link", "fifo"])
def test_a_damaged_file_is_a_miss_and_goes(damage, tmp_path) -> None:
    first, second, third = filled(tmp_path)
    tier = opened(tmp_path)
    path = tier.folder / f"{second.hex()}.page"
    whole = path.read_bytes()
    match damage:
        case "truncate":
            os.truncate(path, len(whole) - 1)
        case "flip":
            path.write_bytes(whole[:3000] + bytes([whole[3000] ^ 4]) + whole[3001:])
        case "empty":
            os.truncate(path, 0)
        case "append":
            path.write_bytes(whole + b"x")
        case "swap":
            path.write_bytes((tier.folder / f"{third.hex()}.page").read_bytes())
        case "link":
            (tmp_path / "elsewhere").write_bytes(whole)
            path.unlink()
            path.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            path.unlink()
            os.mkfifo(path)
    assert tier.fetch(second) is None
    assert tier.fetch(second) is None, "and stays a miss"
    for chain in (first, third):
        found = tier.fetch(chain)
        assert found is not None
        assert b"".join(found.buffers) == content(chain)
    tier.close()


def test_every_flipped_byte_is_noticed(tmp_path) -> None:
    (chain, *_) = filled(tmp_path)
    tier = opened(tmp_path)
    path = tier.folder / f"{chain.hex()}.page"
    whole = path.read_bytes()
    for at in range(0, len(whole), 61):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert tier.fetch(chain) is None, at
    path.write_bytes(whole)
    assert tier.fetch(chain) is not None
    tier.close()


def test_another_models_page_is_a_miss(tmp_path) -> None:
    chains = filled(tmp_path)
    other = opened(tmp_path, "b" * 64)
    for chain in chains:
        name = f"{chain.hex()}.page"
        (other.folder / name).write_bytes((tmp_path / ROOT[:32] / name).read_bytes())
        assert other.fetch(chain) is None
    other.close()


def test_a_page_under_another_key_is_a_miss(tmp_path) -> None:
    """Whoever can write the folder but not read the key cannot make a page."""
    chains = filled(tmp_path)
    (tmp_path / "secret.key").unlink()
    tier = opened(tmp_path)
    assert tier.fetch(chains[0]) is None
    tier.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("point", ["open", "write", "fsync", "rename"])
def test_a_write_that_fails_leaves_nothing(point, code, tmp_path) -> None:
    faults = FailAt(point, OSError(code, os.strerror(code)))
    tier = opened(tmp_path, faults=faults)
    (record, *_) = records(TOKENS)
    with pytest.raises(OSError, match=os.strerror(code)):
        tier.write(record, blob(record.chain))
    assert folder_bytes(tier.folder) == 0
    assert not list(tier.folder.glob("tmp-*"))
    faults.point = None
    tier.write(record, blob(record.chain))
    assert tier.fetch(record.chain) is not None
    tier.close()


def test_a_locked_index_leaves_no_file_without_a_row(tmp_path) -> None:
    tier = opened(tmp_path)
    other = sqlite3.connect(tier.folder / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    (record, *_) = records(TOKENS)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        tier.write(record, blob(record.chain))
    assert folder_bytes(tier.folder) == 0
    other.rollback()
    other.close()
    tier.write(record, blob(record.chain))
    tier.close()
    assert listed(tmp_path) == [record.chain]


def test_a_damaged_index_is_begun_anew(tmp_path) -> None:
    filled(tmp_path)
    for path in tmp_path.rglob("index.sqlite*"):
        path.write_bytes(b"not a database" * 100)
    assert listed(tmp_path) == []
    assert folder_bytes(tmp_path / ROOT[:32]) == 0, "pages without rows go"
    assert len(filled(tmp_path)) == len(listed(tmp_path))


def test_a_folder_deleted_while_it_is_used_is_made_again(tmp_path) -> None:
    top = tmp_path / "prefixes"
    chains = filled(top)
    tier = opened(top)
    for path in sorted(top.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    top.rmdir()
    assert tier.fetch(chains[0]) is None
    for record in records(TOKENS):
        tier.write(record, blob(record.chain))
    assert tier.fetch(chains[0]) is not None
    tier.close()
    assert listed(top) == chains


def test_rows_without_files_and_files_without_rows_go(tmp_path) -> None:
    first, second, third = filled(tmp_path)
    folder = tmp_path / ROOT[:32]
    (folder / f"{second.hex()}.page").unlink()
    (folder / ("00" * 20 + ".page")).write_bytes(b"x")
    (folder / "tmp-1-1").write_bytes(b"x")
    assert listed(tmp_path) == [first]
    assert {path.name for path in folder.glob("*.page")} == {f"{first.hex()}.page"}, "what is behind a gap goes too"
    assert third != first
    assert not list(folder.glob("tmp-*"))


def test_one_process_holds_a_models_folder(tmp_path) -> None:
    tier = opened(tmp_path)
    with pytest.raises(DiskUnusable, match="in use"):
        opened(tmp_path)
    tier.close()
    opened(tmp_path).close()


@pytest.mark.parametrize("what", ["top is a link", "folder is a link", "top is a file"])
def test_links_and_files_in_the_way_are_refused(what, tmp_path) -> None:
    top = tmp_path / "prefixes"
    (tmp_path / "elsewhere").mkdir()
    if what == "top is a link":
        top.symlink_to(tmp_path / "elsewhere")
    elif what == "folder is a link":
        top.mkdir()
        (top / ROOT[:32]).symlink_to(tmp_path / "elsewhere")
    else:
        top.write_text("x")
    with pytest.raises(DiskUnusable):
        opened(top)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_idle_models_make_room_and_live_ones_do_not(tmp_path) -> None:
    filled(tmp_path, "b" * 64)
    filled(tmp_path, "c" * 64)
    old, new = tmp_path / ("b" * 32), tmp_path / ("c" * 32)
    os.utime(old / "index.sqlite", (1, 1))
    live = opened(tmp_path, "c" * 64)
    held = folder_bytes(new)
    tier = DiskTier(tmp_path, ROOT, held + FILE_BYTES)
    assert tier.open()[1] == FILE_BYTES, "what the live one holds is not this one's to use"
    assert not old.exists(), "enforced at the start"
    assert folder_bytes(new) == held
    tier.close()
    live.close()


def test_a_full_budget_takes_idle_models_while_running(tmp_path) -> None:
    filled(tmp_path, "b" * 64)
    size = folder_bytes(tmp_path / ("b" * 32))
    tier = opened(tmp_path, budget=size + 1000)
    (record, *_) = records(TOKENS)
    tier.write(record, blob(record.chain))
    assert not (tmp_path / ("b" * 32)).exists()
    tier.close()


def test_a_clock_moved_back_changes_nothing(tmp_path, monkeypatch) -> None:
    """Order of use is a count, not a time."""
    filled(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    chains = filled(tmp_path, tokens=list(range(50, 62)))
    found = listed(tmp_path)
    assert len(found) == 6
    assert set(chains) < set(found)


def test_a_read_only_place_is_unusable_and_says_so(tmp_path) -> None:
    faults = FailAt("index", OSError(errno.EROFS, os.strerror(errno.EROFS)))
    with pytest.raises(DiskUnusable, match="Read-only"):
        opened(tmp_path, faults=faults)
    opened(tmp_path).close()


def test_the_report_the_check_and_the_clearing(tmp_path) -> None:
    assert (reports(tmp_path / "none"), verify(tmp_path / "none"), clear(tmp_path / "none")) == ([], [], (0, []))
    first, *_ = filled(tmp_path)
    tier = DiskTier(tmp_path, "b" * 64, 1 << 30, about="live")
    tier.open()
    idle, live = reports(tmp_path)
    assert (idle.pages, idle.in_use, idle.damaged) == (3, False, ())
    assert idle.bytes == folder_bytes(tmp_path / ROOT[:32])
    assert (live.pages, live.in_use, live.about) == (0, True, "live")
    path = tmp_path / ROOT[:32] / f"{first.hex()}.page"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert [len(found.damaged) for found in verify(tmp_path)] == [1, 0]
    assert path.exists(), "a check changes nothing"
    freed, left = clear(tmp_path)
    assert freed == idle.bytes
    assert [found.about for found in left] == ["live"]
    assert not (tmp_path / ROOT[:32]).exists()
    tier.close()


def test_the_key_must_be_private(tmp_path) -> None:
    filled(tmp_path)
    (tmp_path / "secret.key").chmod(0o644)
    with pytest.raises(DiskUnusable, match="private key"):
        opened(tmp_path)


def test_roots_of_namespaces_differ() -> None:
    assert root_chain("a") != root_chain("b") != root_chain("")
