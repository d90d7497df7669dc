"""Counts what work does, not how long it takes: the same on every machine, however loaded."""

from __future__ import annotations

import io
import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


@contextmanager
def python_calls() -> Iterator[Counter[str]]:
    """Python functions entered on this thread, by name, while the block runs. Calls of C functions do not count."""
    found: Counter[str] = Counter()

    def seen(frame: Any, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield found
    finally:
        sys.setprofile(before)
        for own in ("python_calls", "_GeneratorContextManager.__exit__"):
            found.pop(own, None)


def primitives(*arrays: mx.array) -> int:
    """MLX primitives in the graph behind lazy arrays: what the host built, and the device is handed."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


class Evaluations:
    """Counts evaluations, and the primitives handed to them, once `watch` was called.

    Attributes:
        count: calls of `mx.eval` and `mx.async_eval` with something lazy in them.
        primitives: of all graphs handed over.
    """

    def __init__(self) -> None:
        self.count = 0
        self.primitives = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count from now on."""
        for name in ("eval", "async_eval"):
            monkeypatch.setattr(mx, name, self._counted(getattr(mx, name)))

    def _counted(self, evaluate: Any) -> Any:
        def counted(*arrays: Any) -> None:
            found = primitives(*_flat(arrays))
            self.primitives += found
            self.count += found > 0
            evaluate(*arrays)

        return counted


def _flat(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [array for value in values for array in _flat(value)]
