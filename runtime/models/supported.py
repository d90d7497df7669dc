"""Which architectures mlx-lm can run, found by reading its folder, not by importing it.

Importing mlx-lm imports MLX, which must not happen before the BLAS is chosen nor on the wrong thread.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

from .errors import ModelError, UnsupportedModel

_MODEL_CLASS = re.compile(r"^class Model\b|^from .* import .*\bModel\b|^Model\b *=", re.MULTILINE)


@functools.cache
def supported_architectures() -> frozenset[str]:
    """Every `model_type` that mlx-lm has a model for, aliases included."""
    package = _package()
    modules = {path.stem for path in (package / "models").glob("*.py") if _is_model(path)}
    aliases = {name for name, module in _aliases(package).items() if module in modules}
    return frozenset(modules | aliases)


def check_architecture(model_type: object, where: str) -> None:
    """Raise `UnsupportedModel`, naming `model_type` and what is supported, unless mlx-lm can run it."""
    if isinstance(model_type, str) and model_type in supported_architectures():
        return
    named = f"has the architecture {model_type!r}, which" if model_type else "names no architecture (`model_type`);"
    raise UnsupportedModel(
        f"{where} {named} this mlx-lm cannot run. Supported: {', '.join(sorted(supported_architectures()))}. "
        "Choose another model, or update mlx-lm if yours is newer than it."
    )


def _is_model(path: Path) -> bool:
    """Whether a module holds a model. One that may end the process when it is imported (olmo) does not count."""
    source = path.read_text(encoding="utf-8", errors="replace")
    return _MODEL_CLASS.search(source) is not None and "sys.exit(" not in source


def _package() -> Path:
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        raise ModelError("mlx-lm is not installed. Install mlx-troupe again: pip install mlx-troupe")
    return Path(spec.origin).parent


def _aliases(package: Path) -> dict[str, str]:
    """`MODEL_REMAPPING` of `mlx_lm/utils.py`; empty when this version has none."""
    tree = ast.parse((package / "utils.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "MODEL_REMAPPING" for target in node.targets
        ):
            value = ast.literal_eval(node.value)
            return value if isinstance(value, dict) else {}
    return {}
