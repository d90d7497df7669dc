"""The decode step as one compiled graph: Python builds it once per shape instead of every step.

On a fast device a step is bound by the host: building 1,000 operations in Python took 6 of 20 ms (Qwen3-8B shape,
32 rows, H200). With a kernel that writes new entries itself, a step reads buffers and changes none in the graph's
sense, so `mx.compile` can keep it; what varies (tokens, positions, starts, cursor, the buffers) are inputs. Only plain
KV layers; a layer that cannot take the kernel ends compiling for good, and steps are built eagerly again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .deferred import MaskedFallback
from .split import SplitLayers
from .stores import KVRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .group import RowGroup

logger = logging.getLogger(__name__)

MOST_GRAPHS = 12
"""Compiled steps kept: shapes change with the batch size's bucket and every 256 tokens of capacity."""


class CompiledStep:
    """Runs one-token steps of groups whose layers all take the kernel. Owned by the MLX thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._graphs: dict[tuple[Any, ...], Callable[..., mx.array]] = {}
        self._groups: Sequence[RowGroup] = ()
        self.refused: str | None = None

    def takes(self, groups: Sequence[RowGroup]) -> bool:
        """Whether these groups' next one-token step can be a compiled one."""
        if self.refused is not None:
            return False
        return all(
            isinstance(store, KVRows) and store.kernel is not None for group in groups for store in group.stores
        ) and all(plane.positions is None for group in groups for plane in group.planes.values())

    def run(self, groups: Sequence[RowGroup], tokens: mx.array) -> mx.array | None:
        """Logits (places, 1, vocabulary) of the step, or None when this model cannot be compiled.

        Args:
            groups: in batch order; `begin(1)` is called here.
            tokens: int32 (places, 1).
        """
        inputs = [tokens]
        shape: list[Any] = []
        for group in groups:
            view = group.begin(1)
            inputs.append(view.offset)
            for plane in view.planes():
                inputs += [plane.starts(None), plane.place]
            stores = _kv(group)
            for store in stores:
                inputs += [store.keys, store.values]
            shape.append((len(group.rows), tuple((store.keys.shape[2], store.keys.dtype) for store in stores)))
        key = tuple(shape)
        graph = self._graphs.pop(key, None) or mx.compile(self._step)
        self._graphs[key] = graph
        while len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._groups = groups
        try:
            return graph(*inputs)
        except MaskedFallback as error:
            self.refused = str(error)
            logger.info("steps are not compiled: %s", error)
            return None
        finally:
            self._groups = ()

    def _step(self, tokens: mx.array, *arrays: mx.array) -> mx.array:
        """What is traced: the model over layers whose arrays are the traced ones for the time being."""
        waiting = list(reversed(arrays))
        kept: list[tuple[KVRows, mx.array, mx.array]] = []
        offsets = []
        try:
            for group in self._groups:
                offsets.append(waiting.pop())
                view = _kv(group)[0].view
                assert view is not None
                view.offset = offsets[-1]
                for plane in view.planes():
                    plane.trace(waiting.pop(), waiting.pop())
                for store in _kv(group):
                    kept.append((store, store.keys, store.values))
                    store.keys, store.values = waiting.pop(), waiting.pop()
            logits: mx.array = self._model(tokens, cache=self._layers(offsets))
            return logits
        finally:
            for store, keys, values in kept:
                store.keys, store.values = keys, values

    def _layers(self, offsets: list[mx.array]) -> list[Any]:
        if len(self._groups) == 1:
            return self._groups[0].layers
        split = SplitLayers(self._groups)
        split.set_offset(mx.concatenate(offsets))
        return split.layers


def _kv(group: RowGroup) -> list[KVRows]:
    return [store for store in group.stores if isinstance(store, KVRows)]
