"""Map the four code folders into one import root; everything else is in pyproject.toml.

Packages are found, not listed, so a new sub-package with an `__init__.py` needs no line here.
"""

from setuptools import find_packages, setup

ROOT = "mlx_troupe"
FOLDERS = ("actors", "runtime", "api", "benchmarks")

setup(
    packages=[
        f"{ROOT}.{package}"
        for package in find_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
    ],
    package_dir={f"{ROOT}.{folder}": folder for folder in FOLDERS},
)
