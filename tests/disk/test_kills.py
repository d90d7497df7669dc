"""kill -9 in the middle of a write, at each point of it: the next start finds whole pages and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.disk import DiskTier, reports, verify
from tests.disk.pages import ROOT, content

if TYPE_CHECKING:
    from pathlib import Path

TIMES = 10
REACHED_A_PAGE = {"write": 2, "fsync": 1, "rename": 1, "row": 1}
"""How often a page reaches a point: after each buffer, and once."""


def killed(top: Path, point: str, nth: int) -> None:
    """A writer that dies at the point."""
    command = [sys.executable, "-m", "tests.disk.kill_writer", str(top), point, str(nth), f"{point} {nth}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert done.returncode == -9, done.stderr
    assert done.stdout == "killed\n", "the hook was reached"


@pytest.mark.parametrize("point", ["write", "fsync", "rename", "row"])
def test_killed_ten_times_in_one_folder(point, tmp_path) -> None:
    """Each life begins on what the last one left. Every page that is listed is whole and right."""
    top = tmp_path / "prefixes"
    least = 0
    for nth in range(1, TIMES + 1):
        killed(top, point, nth)
        leftovers = {entry.name for entry in next(top.glob("a" * 32)).iterdir()}
        tier = DiskTier(top, ROOT, 1 << 30)
        records, budget = tier.open()
        assert budget == 1 << 30
        for record in records:
            found = tier.fetch(record.chain)
            assert found is not None
            assert b"".join(found.buffers) == content(record.chain)
        names = {entry.name for entry in tier.folder.iterdir() if entry.name.endswith(".page")}
        assert names == {record.chain.hex() + ".page" for record in records}, "no orphans"
        assert not list(tier.folder.glob("tmp-*")), "no leftovers"
        tier.close()
        if point != "row":
            assert any(name.startswith("tmp-") for name in leftovers), "the write was cut in the middle"
        assert len(records) >= least + (nth - 1) // REACHED_A_PAGE[point], "what was written before is still there"
        least = len(records)
    assert all(not report.damaged and not report.problem for report in verify(top))
    assert reports(top)[0].pages == least
