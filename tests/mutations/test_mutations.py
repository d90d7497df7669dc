"""Runs the table: each mutation on a copy of the package, the test named for it in a process of its own.

pytest -m heavy tests/mutations
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
FOLDERS = ("actors", "runtime", "api")
NAMES = sorted({mutation.test for mutation in MUTATIONS})


def run_tests(package_parent: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests with `package_parent` before the installed package on the path."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(f"tests/{test}" for test in tests),
    ]
    path = f"{package_parent}{os.pathsep}{ROOT}"
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where `mlx_troupe` is a copy of the three code folders."""
    parent = tmp_path_factory.mktemp("mutated")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, parent / "mlx_troupe" / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    return parent


@pytest.mark.heavy
def test_unmutated_they_all_pass(copy: Path) -> None:
    done = run_tests(copy, NAMES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.what for mutation in MUTATIONS])
def test_the_named_test_notices(copy: Path, mutation: Mutation) -> None:
    path = copy / "mlx_troupe" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.line, mutation.mutant))
    try:
        done = run_tests(copy, [mutation.test])
    finally:
        path.write_text(text)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"\d+ failed", done.stdout)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.what for mutation in MUTATIONS])
def test_the_table_fits_the_code(mutation: Mutation) -> None:
    """Each line is found, once; checked with every run, so that the table does not rot."""
    assert (ROOT / mutation.file).read_text().count(mutation.line) == 1
    assert mutation.line != mutation.mutant
    path, name = mutation.test.split("::")[0], mutation.test.split("::")[-1].split("[")[0]
    assert name == "runTest" or f"def {name}(" in (ROOT / "tests" / path).read_text()
