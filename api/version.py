"""Which version this is."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """This package's version, "unknown" when it is not installed."""
    try:
        return version("mlx-troupe")
    except PackageNotFoundError:
        return "unknown"
