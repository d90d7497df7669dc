"""What the command `mlx-troupe cache` shows and does: every model's folder, from outside any server."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from .faults import NO_FAULTS
from .folders import SUFFIX, delete_idle, folder_bytes, in_use, model_folders, read_key
from .index import FILE, PageIndex
from .page_file import PageDamaged, read_page

if TYPE_CHECKING:
    from pathlib import Path


class FolderReport(msgspec.Struct, frozen=True):
    """One model's pages.

    Attributes:
        folder: its path.
        about: the model's name.
        pages, bytes: of its page files.
        in_use: whether a process serves from it.
        damaged: names of files that do not verify; only `verify` looks.
        problem: why the folder cannot be read; empty when it can.
    """

    folder: str
    about: str
    pages: int
    bytes: int
    in_use: bool
    damaged: tuple[str, ...] = ()
    problem: str = ""


def reports(top: Path) -> list[FolderReport]:
    """Every model's folder."""
    return [_report(path) for path in model_folders(top)]


def verify(top: Path) -> list[FolderReport]:
    """Read every page and check its digest. Changes nothing: a server deletes what it finds damaged."""
    secret = read_key(top) if top.is_dir() else b""
    return [_verified(path, secret) for path in model_folders(top)]


def clear(top: Path) -> tuple[int, list[FolderReport]]:
    """Delete the folders of models that no process serves; returns the bytes freed and what had to stay."""
    freed, left = 0, []
    for path in model_folders(top):
        found = _report(path)
        if delete_idle(path):
            freed += found.bytes
        else:
            left.append(found)
    return freed, left


def _report(path: Path) -> FolderReport:
    names = [name for name in os.listdir(path) if name.endswith(SUFFIX)]
    about, problem = "", ""
    try:
        about = _facts(path)[0]
    except (OSError, sqlite3.Error) as error:
        problem = str(error)
    return FolderReport(str(path), about, len(names), folder_bytes(path), in_use(path), (), problem)


def _facts(path: Path) -> tuple[str, str]:
    if not (path / FILE).exists():
        raise OSError("no index")
    index = PageIndex(path / FILE, NO_FAULTS)
    try:
        return index.fact("about"), index.fact("root")
    finally:
        index.close()


def _verified(path: Path, secret: bytes) -> FolderReport:
    found = _report(path)
    if found.problem:
        return found
    root = _facts(path)[1]
    damaged = []
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for name in sorted(os.listdir(path)):
            if not name.endswith(SUFFIX):
                continue
            with suppress(FileNotFoundError):  # a server may delete it meanwhile
                try:
                    chain = bytes.fromhex(name.removesuffix(SUFFIX))
                    read_page(folder, name, root, chain, secret, NO_FAULTS)
                except (PageDamaged, ValueError) as error:
                    damaged.append(f"{name}: {error}")
    finally:
        os.close(folder)
    return msgspec.structs.replace(found, damaged=tuple(damaged))
