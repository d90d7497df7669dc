"""Kept one-line mutations: each breaks one invariant, and the test that is named for it must notice.

Each runs the named test in a process of its own, on a copy of the actors with one line changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTATIONS = [
    (
        "decode_core.py",
        "            request.computed += 1\n",
        "            request.computed += 0\n",
        "test_decode_invariants.py::test_invariant_1_lengths_advance_at_launch_and_tokens_are_filled_at_commit",
    ),
    (
        "decode_core.py",
        "            if token < 0:\n",
        "            if token < -1:\n",
        "test_decode_invariants.py::test_invariant_1_a_placeholder_is_never_taken_for_a_token",
    ),
    (
        "decode_core.py",
        "            if request.state is finished:\n",
        "            if request is None:\n",
        "test_decode_invariants.py::test_invariant_2_a_stopped_row_is_in_flight_once_more_and_that_token_is_dropped",
    ),
    (
        "decode_core.py",
        "            if request.computed == row.limit:\n",
        "            if request.computed == row.limit + 1:\n",
        "test_decode_invariants.py::test_invariant_2_nothing_is_planned_past_max_tokens",
    ),
    (
        "decode_core.py",
        "        self._leaving.clear()\n        return tuple(leaves)\n",
        "        return tuple(leaves)\n",
        "test_decode_invariants.py::test_invariant_3_a_row_leaves_once_and_is_in_no_later_plan",
    ),
    (
        "prefill_core.py",
        " and prompt.restore and prompt.offered is None:\n",
        " and prompt.restore:\n",
        "test_prefill_ends.py::test_pages_of_a_cancelled_row_are_leased_until_its_chunk_is_over",
    ),
    (
        "decode_core.py",
        "        if not any(flight.rows for flight in self._flights):\n",
        "        if rows is not None:\n",
        "test_decode_invariants.py::test_invariant_4_a_cancel_takes_effect_between_launch_and_commit_only",
    ),
    (
        "decode_core.py",
        "            return\n        self._apply_aborts()\n",
        "            return\n",
        "test_decode_invariants.py::test_invariant_4_a_cancel_takes_effect_between_launch_and_commit_only",
    ),
    (
        "decode_core.py",
        "len(self._flights) >= self._depth:\n",
        "len(self._flights) >= (1 if self._joining else self._depth):\n",
        "test_decode_invariants.py::test_invariant_5_a_row_joins_without_a_barrier",
    ),
    (
        "decode_core.py",
        "        self._unread = self._overlap and bool(rows) and not chunks\n",
        "        self._unread = False\n",
        "test_decode.py::test_a_failed_last_row_is_flushed_by_an_empty_plan",
    ),
    (
        "decode_chunks.py",
        " or (decoding and self._decoded_s",
        " or (False and self._decoded_s",
        "test_decode_chunks.py::test_a_chunk_waits_until_running_rows_had_their_time",
    ),
    (
        "prefill_core.py",
        "        if self.memory is None:\n            return 0\n",
        "        if self.memory is None or self._decoding:\n            return 0\n",
        "test_memory_property.py",
    ),
    (
        "transients.py",
        "        if active_bytes:\n",
        "        if active_bytes and not self.room_bytes:\n",
        "test_memory_property.py",
    ),
    (
        "memory_guard.py",
        "        if not active_bytes or not lengths:\n",
        "        if active_bytes or not lengths:\n",
        "test_memory_property.py",
    ),
    (
        "memory_guard.py",
        "        return count\n\n    def",
        "        return 0\n\n    def",
        "test_memory_property.py",
    ),
    (
        "prefill_policy.py",
        "cost.tokens_within(left_s, prompt.computed))",
        "cost.tokens_within(1.5 * left_s, prompt.computed))",
        "test_memory_property.py",
    ),
    (
        "admission_core.py",
        "        while self._queue:\n            head = self._queue[0]\n",
        "        while self._queue:\n            self._queue.reverse()\n            head = self._queue[0]\n",
        "test_memory_property.py",
    ),
    (
        "prefill_hold.py",
        "        if now_s - self._since_s < HELD_S:\n",
        "        if now_s - self._since_s < 1e9 * HELD_S:\n",
        "test_memory_property.py",
    ),
    (
        "troupe.py",
        "        self.cast.admission.core.fail_all(error)\n",
        "        del error\n",
        "test_troupe_death.py::test_an_actors_death_answers_everyone",
    ),
]


def run_test(root: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run one test with `root` before the installed package on the path."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/actors/{name}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A place where `mlx_troupe` is a copy of the actors and links to the rest."""
    package = tmp_path / "mlx_troupe"
    package.mkdir()
    shutil.copytree(ROOT / "actors", package / "actors", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "runtime").symlink_to(ROOT / "runtime")
    (package / "api").symlink_to(ROOT / "api")
    return tmp_path


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("file", "line", "mutant", "test"), MUTATIONS, ids=[f"{m[3].split('::')[-1]}-{i}" for i, m in enumerate(MUTATIONS)]
)
def test_the_named_test_notices(copy: Path, file: str, line: str, mutant: str, test: str) -> None:
    path = copy / "mlx_troupe" / "actors" / file
    text = path.read_text()
    assert text.count(line) == 1, "the mutation no longer fits its file"
    path.write_text(text.replace(line, mutant))
    done = run_test(copy, test)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed" in done.stdout


@pytest.mark.heavy
def test_without_a_mutation_they_pass(copy: Path) -> None:
    done = run_test(copy, "test_decode.py")
    assert done.returncode == 0, done.stdout + done.stderr
