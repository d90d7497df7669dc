"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

QUOTA_FILE = Path("/sys/fs/cgroup/cpu.max")


def processors(quota_file: Path = QUOTA_FILE) -> int:
    """Cores by affinity, and by the container's quota where there is one (cgroup v2: "QUOTA PERIOD", in us)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, quota_file.read_text().split())
        return min(cores, max(1, math.ceil(quota / period)))
    except (OSError, ValueError, ZeroDivisionError):
        return cores
