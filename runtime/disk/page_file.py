"""One page in one file.

    magic (8) | header length (4, little-endian) | header (msgpack) | buffers, one after the other | digest (32)

The digest is keyed and covers all before it; the key lies beside the folders, readable by its owner alone. So a file
that was cut, changed, made for another model or moved to another name does not verify, and is a miss. It is BLAKE3: 2
ms for a page of 11 MiB, where hashlib's take 7 to 12 and bounded the restoring.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from ..page_blob import PageBlob, PageLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .faults import Faults

MAGIC = b"MLXTPG02"
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 1 << 20
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class FileHeader(msgspec.Struct, frozen=True):
    """Whose page this is, and what its buffers are."""

    root: str
    chain: bytes
    layout: PageLayout


class PageDamaged(ValueError):
    """The file is not the page it should be."""


def write_page(folder: int, name: str, header: FileHeader, blob: PageBlob, secret: bytes, faults: Faults) -> int:
    """Write a page to a new file and make it durable; returns its size.

    Args:
        folder: descriptor of the open folder.

    Raises:
        OSError: as the system does; the file may be there in part.
    """
    faults.reached("open")
    file = os.open(name, NEW_FILE, 0o600, dir_fd=folder)
    try:
        size = 0
        digest = _hasher(secret)
        for part in _parts(header, blob):
            digest.update(part)
            size += _write_all(file, part)
            if size > len(part):
                faults.reached("write")
        size += _write_all(file, digest.digest())
        faults.reached("fsync")
        os.fsync(file)
        return size
    finally:
        os.close(file)


def read_page(folder: int, name: str, root: str, chain: bytes, secret: bytes, faults: Faults) -> PageBlob:
    """Read a page and verify it.

    Raises:
        PageDamaged: it is not what it should be.
        OSError: as the system does.
    """
    faults.reached("read")
    file = os.open(name, READ_FILE, dir_fd=folder)
    try:
        content = _read_all(file)
    finally:
        os.close(file)
    return _verified(content, root, chain, secret)


def _verified(content: memoryview, root: str, chain: bytes, secret: bytes) -> PageBlob:
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if len(content) < len(MAGIC) + 4 + DIGEST_BYTES or body[: len(MAGIC)] != MAGIC:
        raise PageDamaged("not a page file")
    hasher = _hasher(secret)
    hasher.update(body)
    if hasher.digest() != digest:
        raise PageDamaged("the digest does not match")
    start = len(MAGIC) + 4
    length = int.from_bytes(body[len(MAGIC) : start], "little")
    try:
        header = msgspec.msgpack.decode(body[start : start + length], type=FileHeader)
    except msgspec.DecodeError as error:
        raise PageDamaged(f"the header cannot be read: {error}") from error
    if header.root != root or header.chain != chain:
        raise PageDamaged("the page of another prefix or model")
    return PageBlob(header.layout, tuple(_buffers(header.layout, body[start + length :])))


def _buffers(layout: PageLayout, rest: memoryview) -> Iterator[memoryview]:
    at = 0
    for spec in layout.specs():
        size = _item_bytes(spec.dtype)
        for axis in spec.shape:
            size *= axis
        yield rest[at : at + size]
        at += size
    if at != len(rest):
        raise PageDamaged("buffers and layout do not agree")


def _item_bytes(dtype: str) -> int:
    bits = "".join(c for c in dtype if c.isdigit())
    if not bits:
        raise PageDamaged(f"unknown dtype {dtype}")
    return int(bits) // 8


def _parts(header: FileHeader, blob: PageBlob) -> Iterator[memoryview | bytes]:
    encoded = msgspec.msgpack.encode(header)
    yield MAGIC + len(encoded).to_bytes(4, "little") + encoded
    yield from blob.buffers


def _hasher(secret: bytes) -> blake3:
    return blake3(key=secret)


def _write_all(file: int, part: memoryview | bytes) -> int:
    rest = memoryview(part)
    while rest:
        rest = rest[os.write(file, rest) :]
    return len(part)


def _read_all(file: int) -> memoryview:
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode):
        raise PageDamaged("not a regular file")
    content = os.read(file, facts.st_size)
    while len(content) < facts.st_size and (more := os.read(file, facts.st_size - len(content))):
        content += more
    return memoryview(content)
