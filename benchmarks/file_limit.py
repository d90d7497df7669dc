"""How many connections this process may have: a load generator needs more files than a shell's usual 256 or 1,024."""

from __future__ import annotations

import resource

WANTED = 65_536
KEPT = 64
"""Files that are not connections of the load: logs, reports, metrics."""


def most_connections() -> int:
    """Raise the soft limit of open files as far as the hard one allows (and `WANTED`); returns room for connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS has one more limit, which is not told
            wanted = soft
    return max(1, wanted - KEPT)
