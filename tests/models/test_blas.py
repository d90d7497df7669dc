"""BLAS is chosen before MLX, once, without touching what the user set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime.models import blas

if TYPE_CHECKING:
    from pathlib import Path


def in_fresh_process(code: str, **variables: str) -> dict[str, object]:
    """Run `code`, which prints JSON, in a new interpreter without this one's BLAS settings."""
    environment = {key: value for key, value in os.environ.items() if key != blas.CORE_VARIABLE} | variables
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    content: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return content


REPORT = """
import json, sys
{before}
from mlx_troupe.runtime.models.blas import load_blas
report = load_blas()
assert report is load_blas()
import os
print(json.dumps({{
    "status": report.status, "core": report.core, "advice": report.advice, "generic": report.generic,
    "variable": os.environ.get("OPENBLAS_CORETYPE"), "mlx": "mlx.core" in sys.modules,
}}))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only a Linux machine changes its BLAS")


@linux
def test_nothing_here_imports_mlx() -> None:
    assert in_fresh_process(REPORT.format(before=""))["mlx"] is False


@linux
def test_an_installed_openblas_is_loaded_with_a_kernel_for_this_processor() -> None:
    report = in_fresh_process(REPORT.format(before=""))
    if report["status"] == "bundled":
        assert "apt-get install" in str(report["advice"])
        pytest.skip("no BLAS on this machine")
    assert report["status"] == "loaded"
    assert report["generic"] is False
    assert report["advice"] == ""


@linux
def test_the_users_kernel_is_kept() -> None:
    report = in_fresh_process(REPORT.format(before=""), OPENBLAS_CORETYPE="Nehalem")
    assert report["variable"] == "Nehalem"


@linux
def test_mlx_imported_first_is_reported_and_changes_nothing() -> None:
    report = in_fresh_process(REPORT.format(before="import mlx.core"))
    assert report["status"] == "late"
    assert report["variable"] is None
    assert "before the first import of mlx" in str(report["advice"])


@linux
def test_it_can_be_turned_off() -> None:
    report = in_fresh_process(REPORT.format(before=""), MLX_TROUPE_NO_BLAS="1")
    assert report["status"] == "disabled"
    assert report["variable"] is None


def test_macos_is_left_alone() -> None:
    assert blas._load("darwin", {}, mlx_imported=False).status == "native"


def test_without_any_library_the_advice_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_open", lambda name: None)
    report = blas._load("linux", {blas.CORE_VARIABLE: "Haswell"}, mlx_imported=False)
    assert report.status == "bundled"
    assert "libopenblas0-pthread" in report.advice
    assert "pip install mkl" in report.advice


def test_mkl_of_the_environment_is_the_second_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmkl_rt.so.2").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    class Library:
        cblas_sgemm = None

    monkeypatch.setattr(blas, "_open", lambda name: Library() if name.startswith(str(tmp_path)) else None)
    report = blas._load("linux", {blas.CORE_VARIABLE: "Haswell"}, mlx_imported=False)
    assert (report.status, report.core) == ("loaded", "MKL")
    assert report.library == str(tmp_path / "lib" / "libmkl_rt.so.2")


@pytest.mark.parametrize(
    ("flags", "core"),
    [
        ("fpu sse4_2 avx avx2 avx512f avx512vl", "SkylakeX"),
        ("fpu sse4_2 avx avx2 avx512f", "Haswell"),
        ("fpu sse4_2 avx", "Sandybridge"),
        ("fpu sse4_2", "Nehalem"),
        ("fpu", ""),
    ],
)
def test_kernel_by_processor_flags(flags: str, core: str) -> None:
    assert blas.core_for(frozenset(flags.split())) == core


def test_a_generic_kernel_is_told_apart() -> None:
    assert blas._openblas_report("libopenblas.so.0", "Prescott").generic
    assert "SkylakeX" in blas._openblas_report("libopenblas.so.0", "Prescott").advice
    assert not blas._openblas_report("libopenblas.so.0", "Zen").generic


THREADS = """
import json
from mlx_troupe.runtime.models import blas
most = blas.most_threads()
library = blas._openblas_in_use()
counts = []
for threads in (1, most, 0):
    blas.set_threads(threads or 0)
    counts.append(None if library is None else library.openblas_get_num_threads())
print(json.dumps({"most": most, "counts": counts, "again": blas.most_threads()}))
"""


@linux
def test_the_number_of_threads_can_change_and_the_first_is_remembered() -> None:
    found = in_fresh_process(THREADS)
    if found["most"] is None:
        pytest.skip("no OpenBLAS on this machine")
    assert found["counts"] == [1, found["most"], 1]
    assert found["again"] == found["most"]


@linux
def test_a_number_of_threads_that_the_user_chose_is_not_ours_to_change() -> None:
    assert in_fresh_process(THREADS, OPENBLAS_NUM_THREADS="1")["most"] is None
