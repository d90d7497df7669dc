"""Freed memory is kept for the next step, given back on demand, and the user's own settings are left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mlx_troupe.runtime import heap

if heap._glibc(sys.platform, {}) is None:
    pytest.skip("not a glibc", allow_module_level=True)

CODE = """
import json, resource, threading
from mlx_troupe.runtime import heap
import numpy, psutil

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    arrays = [numpy.ones(1 << 20, numpy.uint8) for _ in range(100)]

def steps():
    step()
    before = faults()
    step()
    out["faults"] = faults() - before

out = {"kept": heap.keep_freed() if KEEP else None}
thread = threading.Thread(target=steps)
thread.start()
thread.join()
rss = psutil.Process().memory_info().rss
out["bytes"] = heap.kept_bytes()
heap.give_back()
out["returned"] = rss - psutil.Process().memory_info().rss
out["left"] = heap.kept_bytes()
print(json.dumps(out))
"""


def run(*, keep: bool = True, **variables: str) -> dict[str, int]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    code = CODE.replace("KEEP", str(keep))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_a_step_finds_the_memory_of_the_one_before() -> None:
    kept, plain = run(), run(keep=False)
    assert kept["kept"]
    assert plain["faults"] > 20_000
    assert kept["faults"] < 1_000


def test_it_is_given_back_on_demand() -> None:
    found = run()
    assert found["bytes"] > 60 << 20
    assert found["returned"] > 60 << 20
    assert found["left"] < 4 << 20


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name) -> None:
    found = run(**{name: "glibc.malloc.arena_max=4" if name == "GLIBC_TUNABLES" else "4"})
    assert found["kept"] is False
    assert found["bytes"] == 0


def test_only_glibc_is_touched() -> None:
    assert heap._glibc("darwin", {}) is None
    assert heap._glibc("win32", {}) is None


def test_a_reserve_is_there_before_it_is_needed() -> None:
    code = (
        CODE.replace("step()\n    before", "before").replace("KEEP", "True").replace("thread = ", "RESERVE\nthread = ")
    )
    out = {}
    for size in (0, 128 << 20):
        named = code.replace("RESERVE", f"out['reserved'] = heap.reserve({size})")
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", named], capture_output=True, text=True, check=True)
        out[size] = json.loads(done.stdout)
    assert out[0]["reserved"] == 0
    assert 0 < out[128 << 20]["reserved"] <= 128 << 20
    assert out[128 << 20]["faults"] < out[0]["faults"] / 4


def test_a_reserve_is_no_more_than_asked_nor_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "RESERVE_BYTES", 0)
    assert heap.reserve.__wrapped__(1 << 30) == 0
