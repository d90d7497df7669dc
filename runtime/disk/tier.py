"""One model's pages on disk. Used by the cache's I/O thread alone.

A page is written to a temporary file, made durable, renamed, and then gets its row: what a crash leaves is a file
without a row or a row without a file, and both are removed at the next start. The budget holds for all models together:
when it is full, folders of models that no process serves go first, the oldest first.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ..prefix_page import root_chain
from .faults import NO_FAULTS
from .folders import SUFFIX, delete_idle, folder_bytes, in_use, lock, make_private, model_folders, read_key
from .index import FILE as INDEX_FILE
from .index import PageIndex, open_index
from .page_file import FileHeader, PageDamaged, read_page, write_page

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ..page_blob import PageBlob
    from ..prefix_page import PageRecord
    from .faults import Faults

logger = logging.getLogger(__name__)

DISK_ERRORS = (OSError, sqlite3.Error)


class DiskUnusable(Exception):
    """The tier cannot be opened; the text says why."""


class DiskTier:
    """See the module.

    Args:
        top: the cache's folder.
        root: names the model, its numerics and the page format, as hex digits; other roots share nothing.
        budget_bytes: for page files of all models.
        about: a line for people: the model's name.
    """

    def __init__(self, top: Path, root: str, budget_bytes: int, *, about: str = "", faults: Faults = NO_FAULTS) -> None:
        self.folder = top / root[:32]
        self._top = top
        self._root = root
        self._budget_bytes = budget_bytes
        self._about = about
        self._faults = faults
        self._index: PageIndex | None = None
        self._lock = self._dir = -1
        self._secret = b""
        self._own_bytes = self._count = 0
        self._others: dict[Path, int] = {}

    def open(self) -> tuple[list[PageRecord], int]:
        """Take the folder, clean it, and return its pages (parents first) and the budget that is this model's.

        Raises:
            DiskUnusable: it is another process's, cannot be written, or is no private folder.
        """
        try:
            self._enter()
            records = self._clean(self._open_index().records())
        except DISK_ERRORS as error:
            self.close()
            raise DiskUnusable(f"{self.folder}: {error}") from error
        self._own_bytes = sum(record.file_bytes for record in records)
        self._others = {path: folder_bytes(path) for path in model_folders(self._top) if path != self.folder}
        self._collect_others(0)
        taken = sum(size for path, size in self._others.items() if in_use(path))
        return records, max(0, self._budget_bytes - taken)

    def _enter(self) -> None:
        make_private(self._top)
        self._secret = read_key(self._top)
        make_private(self.folder)
        if self._lock < 0:
            self._lock = lock(self.folder)
        if self._dir >= 0:
            os.close(self._dir)
        self._dir = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _open_index(self) -> PageIndex:
        self._index = open_index(self.folder, self._faults)
        self._index.set_fact("about", self._about)
        self._index.set_fact("root", self._root)
        return self._index

    def write(self, record: PageRecord, blob: PageBlob) -> int:
        """Put a page on disk; returns the bytes of its file.

        Raises:
            OSError, sqlite3.Error: it is not there now; the tier stays usable.
        """
        self._collect_others(blob.nbytes)
        if not self.folder.is_dir() or self._index is None or not (self.folder / INDEX_FILE).exists():
            self._begin_anew()
        assert self._index is not None
        self._count += 1
        temporary = f"tmp-{os.getpid()}-{self._count}"
        name = record.chain.hex() + SUFFIX
        header = FileHeader(self._root, record.chain, blob.layout)
        try:
            size = write_page(self._dir, temporary, header, blob, self._secret, self._faults)
            self._faults.reached("rename")
            self._own_bytes -= self._size(name)
            os.rename(temporary, name, src_dir_fd=self._dir, dst_dir_fd=self._dir)
        except OSError:
            self._unlink(temporary)
            raise
        try:
            os.fsync(self._dir)
            self._index.put(msgspec.structs.replace(record, file_bytes=size))
        except DISK_ERRORS:
            self._unlink(name)
            raise
        self._own_bytes += size
        return size

    def fetch(self, chain: bytes) -> PageBlob | None:
        """A page, verified; None when it cannot be had. A damaged one is deleted."""
        name = chain.hex() + SUFFIX
        try:
            return read_page(self._dir, name, self._root, chain, self._secret, self._faults)
        except PageDamaged as error:
            logger.warning("prefix cache: %s is damaged (%s) and was deleted", name, error)
            self.delete([chain])
        except OSError as error:
            logger.warning("prefix cache: %s cannot be read: %s", name, error)
        return None

    def delete(self, chains: Iterable[bytes]) -> None:
        """Remove pages; faults are left to the next start."""
        gone = list(chains)
        for chain in gone:
            self._unlink(chain.hex() + SUFFIX, own=True)
        if self._index is not None:
            with suppress(sqlite3.Error):
                self._index.remove(gone)

    def touch(self, used: Iterable[tuple[bytes, int]]) -> None:
        """Remember when pages were used last; a fault costs no more than their order."""
        if self._index is not None:
            with suppress(sqlite3.Error):
                self._index.touch(used)

    def close(self) -> None:
        """Let go of the folder."""
        if self._index is not None:
            with suppress(sqlite3.Error):
                self._index.close()
        self._index = None
        for file in (self._dir, self._lock):
            if file >= 0:
                os.close(file)
        self._dir = self._lock = -1

    def _begin_anew(self) -> None:
        """The folder was deleted under us: make it again, empty."""
        logger.warning("prefix cache: %s is gone; it is made again", self.folder)
        if self._index is not None:
            with suppress(sqlite3.Error):
                self._index.close()
            self._index = None
        if not self.folder.is_dir() and self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._own_bytes = 0
        self._enter()
        self._open_index()

    def _clean(self, records: list[PageRecord]) -> list[PageRecord]:
        """Delete what belongs to no page, and rows whose file is not theirs or whose parent is gone; parents first."""
        assert self._index is not None
        sizes = self._sizes()
        by_chain = {record.chain: record for record in records}
        kept = _parents_first([r for r in records if sizes.get(r.chain.hex() + SUFFIX) == r.file_bytes])
        names = {record.chain.hex() + SUFFIX for record in kept}
        for name in sizes.keys() - names:
            self._unlink(name)
        gone = by_chain.keys() - {record.chain for record in kept}
        if gone:
            self._index.remove(gone)
        return kept

    def _sizes(self) -> dict[str, int]:
        """Page files and temporary ones, with their sizes; a symbolic link has size -1, and so goes."""
        with os.scandir(self.folder) as entries:
            return {
                entry.name: entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else -1
                for entry in entries
                if entry.name.endswith(SUFFIX) or entry.name.startswith("tmp-")
            }

    def _collect_others(self, more_bytes: int) -> None:
        """Delete idle models' folders, the oldest first, until `more_bytes` fit."""
        if self._own_bytes + more_bytes + sum(self._others.values()) <= self._budget_bytes:
            return
        for path in sorted(self._others, key=_age):
            if self._own_bytes + more_bytes + sum(self._others.values()) <= self._budget_bytes:
                return
            if delete_idle(path):
                logger.info("prefix cache: deleted %s, of a model that is not served", path.name)
                del self._others[path]

    def _size(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self._dir, follow_symlinks=False).st_size
        except OSError:
            return 0

    def _unlink(self, name: str, *, own: bool = False) -> None:
        size = self._size(name) if own else 0
        try:
            os.unlink(name, dir_fd=self._dir)
        except OSError:
            return
        self._own_bytes = max(0, self._own_bytes - size)


def _age(path: Path) -> float:
    try:
        return (path / INDEX_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _parents_first(records: list[PageRecord]) -> list[PageRecord]:
    """Records whose parents are among them, or that begin a namespace; each after its parent."""
    below: dict[bytes, list[PageRecord]] = {}
    chains = {record.chain for record in records}
    order: list[PageRecord] = []
    for record in records:
        if record.parent in chains:
            below.setdefault(record.parent, []).append(record)
        elif record.parent == root_chain(record.namespace):
            order.append(record)
    for record in order:
        order.extend(below.get(record.chain, ()))
    return order
