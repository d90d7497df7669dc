"""Writes pages until a point of the tier is reached for the nth time; then the process kills itself.

python -m tests.disk.kill_writer FOLDER POINT NTH SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from mlx_troupe.runtime.disk import DiskTier
from tests.disk.pages import ROOT, blob, records


class KillAt:
    """Ends the process at the nth time that a point is reached."""

    def __init__(self, point: str, nth: int) -> None:
        self._point = point
        self._left = nth

    def reached(self, point: str, /) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                print("killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, point, nth, seed = sys.argv[1:]
    tier = DiskTier(Path(folder), ROOT, 1 << 30, faults=KillAt(point, int(nth)))
    tier.open()
    rng = random.Random(seed)
    while True:
        for record in records([rng.randrange(100) for _ in range(12)]):
            tier.write(record, blob(record.chain))


if __name__ == "__main__":
    main()
