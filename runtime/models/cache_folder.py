"""The user's cache folder: where it is, and how a folder appears in it in one step.

A folder is built under a temporary name and renamed when it is complete, while a file lock is held, so
another process sees either nothing or all of it, and two processes never build the same thing twice.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from .errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger(__name__)

CACHE_VARIABLE = "MLX_TROUPE_CACHE"
MARGIN_BYTES = 64 << 20
"""Free space left alone when a folder is built, in bytes."""


def default_cache_folder(environment: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """`MLX_TROUPE_CACHE`, else the system's cache folder of the user with `mlx-troupe` in it."""
    environment = os.environ if environment is None else environment
    if explicit := environment.get(CACHE_VARIABLE):
        return Path(explicit).expanduser()
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-troupe"
    xdg = environment.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "mlx-troupe"


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target` against other processes; waits as long as it takes.

    Raises `ModelError` when the cache folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(target.parent / f".{target.name}.lock")
        acquired = lock.acquire()
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    with acquired:
        _sweep(target)
        yield


def _sweep(target: Path) -> None:
    """Delete what a process that was killed left behind; the lock says that nobody is at it now."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def build_folder(target: Path, *, needed_bytes: int = 0) -> Iterator[Path]:
    """Yield an empty folder next to `target`; on success it becomes `target`, on failure it goes.

    The caller holds `locked(target)`. An existing `target` is replaced. Raises `ModelError` when the disk
    lacks `needed_bytes` or the folder cannot be written.
    """
    check_free_space(target.parent, needed_bytes)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    try:
        yield temporary
        _replace(temporary, target)
    except OSError as error:
        raise _unwritable(target.parent, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(temporary: Path, target: Path) -> None:
    os.chmod(temporary, 0o755)
    if target.exists():
        shutil.rmtree(target)
    os.replace(temporary, target)


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Raise `ModelError` when the disk of `folder` has less than `needed_bytes` and a margin free."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes and free_bytes < needed_bytes + MARGIN_BYTES:
        raise ModelError(
            f"{folder} has {free_bytes >> 20} MiB free, the model needs {needed_bytes >> 20} MiB. "
            f"Free some space or set {CACHE_VARIABLE} to a folder on a larger disk."
        )


def folder_bytes(folder: Path) -> int:
    """Bytes of all regular files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _unwritable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"Cannot write to the cache folder {folder}: {error.strerror or error}. "
        f"Free space, fix its permissions, or set {CACHE_VARIABLE} to a writable folder."
    )
