"""The cache's folder on disk: a key, and one private folder for each model, held by one process at a time."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY_FILE = "secret.key"
KEY_BYTES = 32
LOCK_FILE = "in-use.lock"
SUFFIX = ".page"
TEMPORARY = "tmp-"


class FolderInUse(OSError):
    """Another process has this model's folder."""


def make_private(path: Path) -> None:
    """See that a folder is there, is no symbolic link, is ours, and open to nobody else.

    Raises:
        OSError: it is not, and cannot be made so.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise OSError(f"{path} is not a folder of its own")
    if facts.st_uid != os.getuid():
        raise OSError(f"{path} belongs to another user")
    if stat.S_IMODE(facts.st_mode) != 0o700:
        path.chmod(0o700)


def read_key(top: Path) -> bytes:
    """The key of all digests under `top`; made on first use."""
    path = top / KEY_FILE
    fresh = top / f"{TEMPORARY}{os.getpid()}-key"
    if not path.exists():
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(secrets.token_bytes(KEY_BYTES))
            out.flush()
            os.fsync(out.fileno())
        with suppress(FileExistsError):
            os.link(fresh, path)  # the first of several wins
        fresh.unlink()
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(file, "rb") as source:
        facts = os.fstat(source.fileno())
        key = source.read()
    if len(key) != KEY_BYTES or facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise OSError(f"{path} is not a private key of {KEY_BYTES} bytes: delete it to begin anew")
    return key


def lock(folder: Path) -> int:
    """Hold a model's folder; returns a descriptor to close.

    Raises:
        FolderInUse: another process has it.
    """
    file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise FolderInUse(f"{folder} is in use by another process") from None
    except OSError:
        os.close(file)
        raise
    return file


def model_folders(top: Path) -> Iterator[Path]:
    """Folders of models."""
    if not top.is_dir():
        return
    for path in sorted(top.iterdir()):
        if path.is_dir() and not path.is_symlink() and len(path.name) == 32:
            yield path


def folder_bytes(folder: Path) -> int:
    """Bytes of a model's page files."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def delete_idle(folder: Path) -> bool:
    """Delete a model's folder unless a process has it."""
    try:
        held = lock(folder)
    except OSError:
        return False
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)
    return not folder.exists()


def in_use(folder: Path) -> bool:
    """Whether a process has the folder."""
    try:
        os.close(lock(folder))
    except OSError:
        return True
    return False
