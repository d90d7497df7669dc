"""Steps write into the KV buffers they read: in the modes that are offered, no step copies a layer.

The model is shallow and its buffers large, so that attention over them is most of a step (DESIGN section 3, donation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from mlx_troupe.runtime.clock import MonotonicClock
from mlx_troupe.runtime.engine.engine import MlxEngine
from mlx_troupe.runtime.engine.overlap import _blank, choose_overlap
from mlx_troupe.runtime.engine.probe import choose_layout
from mlx_troupe.runtime.engine_protocol import EngineFacts

from .bench import Bench, settled_memory

if TYPE_CHECKING:
    from collections.abc import Callable

DEPTHS = (4096, 900)
"""Tokens of the two rows: in one class they are ragged, in two they split the step."""
STEPS = 8


class Measured(Bench):
    """Knows what memory held before its rows came."""

    def __init__(self, engine: MlxEngine) -> None:
        super().__init__(engine)
        self.floor_bytes = settled_memory()

    def layer_bytes(self) -> int:
        """The smallest layer's keys and values."""
        groups = self.engine._batch._groups.values()
        return min(sum(array.nbytes for array in group.stores[0].arrays()) for group in groups)

    def extra_bytes(self) -> int:
        """Peak of a few steps beyond what the rows' buffers take."""
        self.flush()
        settled_memory()
        mx.reset_peak_memory()
        self.steps(STEPS)
        self.flush()
        return mx.get_peak_memory() - self.floor_bytes - sum(array.nbytes for array in self.engine._batch.arrays())


@pytest.fixture(scope="module")
def wide_model() -> Any:
    from mlx_lm.models import llama

    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        vocab_size=256,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def start(wide_model) -> Callable[..., Measured]:
    """Two rows that decode deep in their context, a step in flight."""
    layout = choose_layout(wide_model)

    def make(overlap: str, classes: tuple[int, ...]) -> Measured:
        batch = layout.new_batch(wide_model, classes)
        mode = choose_overlap(overlap, wide_model, layout.shapes, batch).mode
        facts = EngineFacts(vocab_size=256, context_length=1 << 20, overlap=mode)
        bench = Measured(MlxEngine(wide_model, batch, facts, page_tokens=256, clock=MonotonicClock()))
        for row, depth in enumerate(DEPTHS):
            bench.engine._staged[row] = _blank(wide_model, depth)
        joins = tuple(bench.joining(row, [1] * (depth + 1)) for row, depth in enumerate(DEPTHS))
        bench.plan(joins=joins, discards=(0, 1))
        bench.steps(2)
        return bench

    return make


@pytest.mark.parametrize("classes", [(), (2048, 1 << 20)], ids=["one-class", "classes"])
@pytest.mark.parametrize("overlap", ["auto", "build", "off"])
def test_no_step_copies_a_layer(overlap, classes, start) -> None:
    """`auto` is the way the probe chose, whichever it is."""
    bench = start(overlap, classes)
    assert bench.extra_bytes() < bench.layer_bytes() // 3


def test_a_copy_would_be_seen(start) -> None:
    """Whoever holds a view of the buffers makes the next step copy them: the measurement above can tell."""
    bench = start("build", ())
    store = bench.engine._batch._groups[1 << 62].stores[0]
    alias = store.keys[:, :, :1]
    mx.eval(alias)
    assert bench.extra_bytes() > store.keys.nbytes // 2
    assert alias.shape[2] == 1


def test_launching_ahead_is_chosen_only_where_it_copies_nothing(start) -> None:
    """If a launch-ahead engine copies on this machine, the probe must have said so."""
    launch = start("launch", ())
    copies = launch.extra_bytes() > launch.layer_bytes() // 2
    assert not (copies and start("auto", ()).engine.facts.overlap == "launch")
