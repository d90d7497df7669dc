"""The index of one model's folder: SQLite in WAL mode, one row a page. Used by one thread."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

from ..prefix_page import PageRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .faults import Faults

FILE = "index.sqlite"
BUSY_S = 0.25
SCHEMA = """
CREATE TABLE IF NOT EXISTS page (
    chain BLOB PRIMARY KEY, parent BLOB NOT NULL, namespace TEXT NOT NULL, key BLOB NOT NULL,
    state INTEGER NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


class PageIndex:
    """See the module. Every method may raise sqlite3.Error; a damaged index is begun anew by `open_index`."""

    def __init__(self, path: Path, faults: Faults) -> None:
        self._faults = faults
        faults.reached("index")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._base = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.executescript(SCHEMA)
        except sqlite3.Error:
            self._base.close()
            raise

    def records(self) -> list[PageRecord]:
        """All pages, in no order."""
        rows = self._base.execute("SELECT chain, parent, namespace, key, state, bytes, used FROM page")
        return [PageRecord(c, p, n, k, bool(s), b, u) for c, p, n, k, s, b, u in rows]

    def put(self, record: PageRecord) -> None:
        """Add a page, or replace it."""
        self._faults.reached("row")
        self._base.execute(
            "INSERT OR REPLACE INTO page VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                record.chain,
                record.parent,
                record.namespace,
                record.key,
                record.state,
                record.file_bytes,
                record.used,
            ),
        )

    def remove(self, chains: Iterable[bytes]) -> None:
        """Forget pages."""
        with self._base:
            self._base.execute("BEGIN")
            self._base.executemany("DELETE FROM page WHERE chain = ?", [(chain,) for chain in chains])

    def touch(self, used: Iterable[tuple[bytes, int]]) -> None:
        """Remember when pages were used last."""
        with self._base:
            self._base.execute("BEGIN")
            self._base.executemany("UPDATE page SET used = ? WHERE chain = ?", [(when, chain) for chain, when in used])

    def fact(self, name: str) -> str:
        """A line about the folder; empty when there is none."""
        row = self._base.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return "" if row is None else str(row[0])

    def set_fact(self, name: str, value: str) -> None:
        """Say something about the folder."""
        self._base.execute("INSERT OR REPLACE INTO fact VALUES (?, ?)", (name, value))

    def close(self) -> None:
        """Fold the log into the file."""
        self._base.close()


def open_index(folder: Path, faults: Faults) -> PageIndex:
    """The index of a folder; a damaged one is deleted (its pages then are orphans).

    Raises:
        sqlite3.Error, OSError: it can be neither opened nor made.
    """
    path = folder / FILE
    index = None
    try:
        index = PageIndex(path, faults)
        index.records()
    except sqlite3.OperationalError:
        if index is not None:
            index.close()
        raise  # locked, or no right to write: not damaged
    except sqlite3.DatabaseError:
        if index is not None:
            index.close()
        for name in (FILE, FILE + "-wal", FILE + "-shm"):
            with suppress(FileNotFoundError):
                (folder / name).unlink()
        return PageIndex(path, faults)
    return index
