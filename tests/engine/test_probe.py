"""The layout probe: which way each architecture takes and why; a model whose batched code is wrong is caught."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_troupe.runtime.engine import overlap as overlap_module
from mlx_troupe.runtime.engine.kv.batch import RowBatch
from mlx_troupe.runtime.engine.kv.solo import SoloBatch
from mlx_troupe.runtime.engine.kv.split import SplitKV
from mlx_troupe.runtime.engine.overlap import choose_overlap
from mlx_troupe.runtime.engine.probe import Layout, choose_layout
from tests.models.tiny import ARCHITECTURES, build_tiny

from .conftest import CLASSES, ROW_BY_ROW, SPLIT, VOCAB, prompt_of
from .steps import decode_all

PER_CLASS = "split: "
"""Recurrent states are indexed, and deepseek_v3 transposes keys itself: neither can be done to a stand-in."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_takes_its_way(architecture, tiny_model) -> None:
    layout = choose_layout(tiny_model(architecture))
    if architecture in ROW_BY_ROW:
        assert layout.way == "row-by-row"
        assert ROW_BY_ROW[architecture] in layout.reason
        assert layout.shapes is None
        assert layout.describe().startswith("row-by-row: ")
    elif architecture in SPLIT:
        assert (layout.way, layout.reason) == ("split", "logits agree")
        assert layout.describe() == "batched"
    else:
        assert layout.way == "per-class"
        assert layout.reason.startswith(PER_CLASS)
        assert layout.describe() == "batched"


class Wrapped:
    """A model with a fault in its batched code; rows alone are right."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        if cache is not None and (hasattr(cache[0], "view") or isinstance(cache[0], SplitKV)):
            return self.batched(tokens, cache)
        return self.model(tokens, cache=cache)

    def batched(self, tokens: mx.array, cache: Any) -> mx.array:
        return self.model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class MaskBlind(Wrapped):
    """Ignores masks: every row sees what others' longer rows leave room for."""

    def batched(self, tokens: mx.array, cache: Any) -> mx.array:
        for layer in cache:
            layer.make_mask = lambda *args, **options: None
        return self.model(tokens, cache=cache)


class OneOffset(Wrapped):
    """Takes one position for all rows, as models do that want an int."""

    def batched(self, tokens: mx.array, cache: Any) -> mx.array:
        for layer in cache:
            layer.view.offset = mx.full(layer.view.offset.shape, layer.view.offset.max())
        return self.model(tokens, cache=cache)


class Mixing(Wrapped):
    """Lets rows influence each other, a little."""

    def batched(self, tokens: mx.array, cache: Any) -> mx.array:
        logits = self.model(tokens, cache=cache)
        return logits + 0.01 * logits.mean(axis=0, keepdims=True)


class NotANumber(Wrapped):
    """NaN agrees with nothing."""

    def batched(self, tokens: mx.array, cache: Any) -> mx.array:
        return self.model(tokens, cache=cache) * mx.nan


class Raising(Wrapped):
    """Wants an int."""

    def batched(self, tokens: mx.array, cache: Any) -> mx.array:
        return tokens[:, cache[0].offset.item() :]


@pytest.mark.parametrize("kind", [MaskBlind, OneOffset, Mixing, NotANumber, Raising])
def test_a_wrong_model_runs_row_by_row(kind, tiny_model, solo) -> None:
    model = kind(tiny_model("llama"))
    layout = choose_layout(model)
    assert layout.way == "row-by-row"
    assert ("Error" if kind is Raising else "logits differ") in layout.reason
    batch = layout.new_batch(model, CLASSES)()
    assert isinstance(batch, SoloBatch)
    prompts = [prompt_of(23), prompt_of(5)]
    assert decode_all(model, batch, prompts, 8) == [solo("llama", prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("architecture", ["llama", "lfm2"])
def test_16_bit_models_are_batched_and_wrong_ones_are_caught(architecture, dtype, tmp_path) -> None:
    from mlx_lm import load

    model = load(str(build_tiny(architecture, tmp_path, vocab=VOCAB)))[0]
    model.set_dtype(dtype)
    assert choose_layout(model).way in ("split", "per-class")
    if architecture == "llama":
        assert choose_layout(MaskBlind(model)).way == "row-by-row"


class WrongSplit(Wrapped):
    """Right with one class; mixes up the classes when there are several."""

    def batched(self, tokens: mx.array, cache: Any) -> mx.array:
        for layer in cache:
            if isinstance(layer, SplitKV):
                bounds = [bound for _, bound in reversed(layer.parts)]
                layer.parts = [(part, bound) for (part, _), bound in zip(layer.parts, bounds, strict=True)]
        return self.model(tokens, cache=cache)


def test_a_model_that_cannot_split_runs_class_by_class(tiny_model, solo) -> None:
    model = WrongSplit(tiny_model("llama"))
    layout = choose_layout(model)
    assert layout.way == "per-class"
    assert layout.reason.startswith("split: logits differ")
    batch = layout.new_batch(model, CLASSES)()
    assert isinstance(batch, RowBatch)
    prompts = [prompt_of(23), prompt_of(5), prompt_of(70)]
    assert decode_all(model, batch, prompts, 20) == [solo("llama", prompt, 20) for prompt in prompts]


def test_a_layer_that_is_never_written_runs_row_by_row(tiny_model) -> None:
    class Idle(Wrapped):
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            return self.model(tokens)

        def make_cache(self) -> list[Any]:
            from mlx_lm.models.cache import KVCache

            return [KVCache()]

    layout = choose_layout(Idle(tiny_model("llama")))
    assert layout.way == "row-by-row"
    assert "never writes" in layout.reason


def test_the_probe_leaves_nothing_behind(tiny_model) -> None:
    from .bench import settled_memory

    model = tiny_model("llama")
    choose_layout(model)
    base = settled_memory()
    choose_layout(model)
    assert settled_memory() - base < 4096


# --- how steps overlap --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["launch", "build", "off"])
def test_a_mode_that_is_set_is_not_measured(mode) -> None:
    assert choose_overlap(mode, None, None, lambda: pytest.fail("measured")) == (mode, "as set")


def test_without_batched_kv_steps_are_built_ahead(tiny_model, layout_of) -> None:
    for architecture in ("llama4", "mamba2"):
        layout = layout_of(architecture)
        found = choose_overlap("auto", tiny_model(architecture), layout.shapes, lambda: pytest.fail("measured"))
        assert found == ("build", "no batched KV to measure")


@pytest.mark.parametrize(("extra", "mode"), [(0.6, "build"), (0.4, "launch"), (-1.0, "launch")])
def test_a_copy_of_half_a_layer_means_build_ahead(extra, mode, tiny_model, layout_of, monkeypatch) -> None:
    layout: Layout = layout_of("llama")
    layer = 2 * overlap_module.PROBE_TOKENS * layout.shapes[0].token_bytes

    def peak(model: Any, batch: Any, tokens: int, *, ahead: bool) -> int:
        return int(10_000_000 + extra * layer * ahead)

    monkeypatch.setattr(overlap_module, "_peak_bytes", peak)
    found = choose_overlap("auto", tiny_model("llama"), layout.shapes, layout.new_batch(None, ()))
    assert found.mode == mode
    assert f"{layer / 2**20:.1f} MiB of KV a layer" in found.reason


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "gemma3n", "deepseek_v3"])
def test_measuring_runs_on_every_kind_of_cache(architecture, tiny_model, layout_of) -> None:
    layout = layout_of(architecture)
    model = tiny_model(architecture)
    found = choose_overlap("auto", model, layout.shapes, layout.new_batch(model, CLASSES))
    assert found.mode in ("launch", "build")
    assert "MiB" in found.reason
