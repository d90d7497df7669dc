"""What the operating system says of memory: the process, the machine, the container. Any thread; no MLX."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

_CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NO_LIMIT_BYTES = 1 << 60


def footprint_bytes() -> int:
    """What this process uses: on macOS its unique set, which counts device buffers, elsewhere its resident set."""
    process = psutil.Process()
    if sys.platform == "darwin":
        return int(process.memory_full_info().uss)
    return int(process.memory_info().rss)


def machine_bytes() -> tuple[int, int]:
    """Total and available bytes of the machine."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def container_bytes(files: tuple[str, ...] = _CGROUP_FILES) -> int | None:
    """The control group's limit; None when there is none."""
    for name in files:
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            return int(text)
    return None
