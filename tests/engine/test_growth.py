"""Long rows, many rows, long prompts: buffers grow past every boundary and shrink, and tokens stay those of solo."""

from __future__ import annotations

import pytest

from .bench import Bench
from .conftest import prompt_of


def run(bench: Bench, architecture: str, solo, steps: int) -> None:
    bench.steps(steps)
    bench.flush()
    for row, said in bench.tokens.items():
        assert said == solo(architecture, bench.prompts[row], len(said)), f"row {row}"
    bench.engine._batch.check_integrity()


@pytest.mark.parametrize(("architecture", "classes"), [("llama", (256, 512, 1024)), ("gemma3_text", ())])
def test_rows_grow_across_capacities_and_classes(architecture, classes, new_engine, solo) -> None:
    """Over 600 tokens: several capacities of 256, length classes or windows that slid dozens of times."""
    bench = Bench(new_engine(architecture, classes=classes))
    bench.join(0, prompt_of(5))
    bench.steps(120)
    bench.join(1, prompt_of(130))
    run(bench, architecture, solo, 490)
    assert len(bench.tokens[0]) > 600
    assert max(group.planes[None].capacity for group in bench.engine._batch._groups.values()) > 600


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "llama4"])
def test_more_rows_than_32_slots(architecture, new_engine, solo) -> None:
    """40 rows, joining in handfuls; then most leave, slots shrink, and new ones come."""
    bench = Bench(new_engine(architecture))
    lengths = [1, 5, 17, 9]
    row = 0
    while row < 40:
        handful = list(range(row, row + 8))
        for each in handful:
            bench.stage(each, prompt_of(lengths[each % 4]))
        bench.plan(
            joins=tuple(bench.joining(each, prompt_of(lengths[each % 4])) for each in handful), discards=tuple(handful)
        )
        row += 8
    assert sum(each is not None for each in bench.engine._batch.order) == 40
    bench.steps(4)
    places = len(bench.engine._batch.order)
    bench.plan(leaves=tuple(bench.leaving(each) for each in range(2, 40)))
    bench.steps(20)
    if architecture != "llama4":
        assert len(bench.engine._batch.order) < places / 4
    bench.join(50, prompt_of(23))
    run(bench, architecture, solo, 6)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_prompt_longer_than_a_chunk_of_2048(architecture, new_engine, solo) -> None:
    """In chunks of 2,048 and in others, beside short rows, with the default classes."""
    bench = Bench(new_engine(architecture, classes=(1024, 4096)))
    prompt = prompt_of(2300)
    bench.join(0, prompt_of(5))
    for row, chunk in ((1, 2048), (2, 700)):
        bench.stage(row, prompt, chunk=chunk)
        bench.plan(joins=(bench.joining(row, prompt),), discards=(row,))
    run(bench, architecture, solo, 10)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "gemma3n", "deepseek_v3", "mamba", "lfm2"])
def test_one_token_prompts_beside_long_rows(architecture, new_engine, solo) -> None:
    """Rows of length 0 in the batch: alone, with others of length 0, and with rows beyond their window."""
    bench = Bench(new_engine(architecture, classes=()))
    bench.plan(joins=(bench.joining(0, prompt_of(1, seed=1)), bench.joining(1, prompt_of(1, seed=2))))
    bench.plan()
    bench.join(2, prompt_of(40))
    bench.plan(joins=(bench.joining(3, prompt_of(1, seed=3)),))
    bench.plan(joins=(bench.joining(4, prompt_of(1, seed=1)),))
    run(bench, architecture, solo, 18)
    assert bench.tokens[4] == bench.tokens[0][: len(bench.tokens[4])]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_more_slots_do_not_get_the_places_of_a_long_row_that_left(architecture, new_engine, solo) -> None:
    bench = Bench(new_engine(architecture, classes=(1024,)))
    bench.join(0, prompt_of(700))
    bench.join(1, prompt_of(20))
    bench.leave(0)
    (group,) = bench.engine._batch._groups.values()
    assert group.planes[None].capacity > 700
    before = len(group.rows)
    for row in range(2, 2 + before):
        bench.join(row, prompt_of(20 + row))
    assert len(group.rows) > before
    assert group.planes[None].capacity == 256
    bench.rows = [row for row in bench.rows if row]
    del bench.tokens[0]
    run(bench, architecture, solo, 12)
