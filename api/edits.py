"""Changing somebody else's files: whole or not at all, and never through a surprise.

A link is followed once, to a regular file; a file that may not be written, is no text or is large is refused. What is
written appears at once (a temporary file beside it, then a rename), with the old file's mode.
"""

from __future__ import annotations

import os
import stat
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 4 << 20


class EditRefused(Exception):
    """A file that is better left alone; the text says why."""


def read_text(path: Path) -> str | None:
    """The text of a file, None when there is none. Raises EditRefused."""
    try:
        real = _real(path)
        facts = real.stat()
        if facts.st_size > MAX_BYTES:
            raise EditRefused(f"{path}: larger than {MAX_BYTES >> 20} MiB")
        with real.open(encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise EditRefused(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise EditRefused(f"{path}: {error.strerror}") from None


def replace_file(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file at once; `mode` is for one that is not there yet. Raises EditRefused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            real = _real(path)
        except FileNotFoundError:
            real = path.parent.resolve() / path.name
        else:
            mode = stat.S_IMODE(real.stat().st_mode)
            if not os.access(real, os.W_OK) or not mode & 0o222:
                raise EditRefused(f"{path}: read-only")
        _write(real, content, mode)
    except OSError as error:
        raise EditRefused(f"{path}: {error.strerror}") from None


def keep_copy(path: Path, content: bytes) -> None:
    """Write a copy for the owner's eyes only; a link of that name is replaced, not followed. Raises EditRefused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path.parent.resolve() / path.name, content, 0o600)
    except OSError as error:
        raise EditRefused(f"{path}: {error.strerror}") from None


def remove_file(path: Path) -> None:
    """Delete a file or a link, not what the link leads to. Raises EditRefused."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise EditRefused(f"{path}: {error.strerror}") from None


def _real(path: Path) -> Path:
    """The regular file behind a path. Raises FileNotFoundError, EditRefused."""
    if path.is_symlink() and not path.exists():
        raise EditRefused(f"{path}: a link that leads nowhere")
    real = path.resolve(strict=True)
    if not real.is_file():
        raise EditRefused(f"{path}: not a regular file")
    return real


def _write(real: Path, content: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{real.name}.", dir=real.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, real)
    except BaseException:
        os.unlink(name)
        raise
