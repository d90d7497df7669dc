"""A small forced limit on the real MLX thread: nothing passes it, and everybody is served or told why not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from mlx_troupe.runtime import Generation, InvalidRequest, Runtime, SamplingParams, TroupeError
from mlx_troupe.runtime.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GREEDY = SamplingParams(temperature=0)
REFUSALS = {"memory_limit_exceeded", "memory_admission_stalled", "overloaded", "out_of_memory"}


async def limit_for(folder: Path, room_bytes: int) -> int:
    """A limit under which admission may plan with about `room_bytes` beside the idle process."""
    base = 0
    for _ in range(4):  # what a load leaves behind is there at the next, each time less
        async with Runtime(model=str(folder)) as runtime:
            assert runtime._supervisor.troupe is not None
            base = runtime._supervisor.troupe.cast.memory_enforcer.base_bytes
    return int((base + room_bytes) / 0.9)


async def visit(runtime: Runtime, rng: random.Random, longest: int) -> str:
    """One random client: "done", "left" or the code of a typed refusal."""
    prompt = tuple(
        rng.randrange(10, 500) for _ in range(rng.choice((1, 7, rng.randrange(1, 300), rng.randrange(1, longest))))
    )
    count = rng.randrange(1, 60)
    leaves_after = rng.randrange(0, 20) if rng.random() < 0.2 else None
    heard = 0
    for _ in range(rng.randrange(200)):
        await asyncio.sleep(0)
    try:
        async with runtime.stream(
            Generation(tokens=prompt, sampling=GREEDY, max_tokens=count, ignore_eos=True)
        ) as stream:
            async for event in stream:
                heard += len(getattr(event, "tokens", ()))
                if hasattr(event, "retry_after_s"):
                    assert event.retry_after_s, "it fits alone, so it may be tried again"
                    return event.code
                if leaves_after is not None and heard >= leaves_after:
                    return "left"
    except TroupeError as error:
        assert isinstance(error, InvalidRequest | Overloaded)  # noqa: PT017
        return error.code
    assert heard == count
    return "done"


async def crowd(folder: Path, visits: int, longest: int, room_bytes: int) -> None:
    limit = await limit_for(folder, room_bytes)
    rng = random.Random(3)
    async with Runtime(model=str(folder), memory_limit_bytes=limit, page_tokens=64, max_queue=1000) as runtime:
        troupe = runtime._supervisor.troupe
        assert troupe is not None
        enforcer = troupe.cast.memory_enforcer
        facts = runtime._supervisor.loaded.facts  # type: ignore[union-attr]
        assert troupe.row_limit_tokens is None or troupe.row_limit_tokens >= longest
        ends = await asyncio.gather(*(visit(runtime, rng, longest) for _ in range(visits)))
        assert set(ends) <= {"done", "left"} | REFUSALS, set(ends)
        assert ends.count("done") > visits / 2
        runtime.statistics()
        enforcer._sampled_s = None
        troupe.tick()
        while enforcer._asked:  # noqa: ASYNC110  # a sample is on its way
            await asyncio.sleep(0.01)
        line = limit - (enforcer.base_bytes - facts.base_bytes)
        holds, preempted = troupe.cast.admission.core.holds, troupe.cast.decode.core.preempted
        sizes = f"peak {enforcer.sample.peak_bytes / 2**20:.1f} MiB, line {line / 2**20:.1f} MiB"
        print(f"{sizes}, holds {dict(holds)}, preempted {preempted}, ends {Counter(ends)}")
        assert enforcer.sample.peak_bytes <= line
        assert troupe.cast.admission.core.holds["memory_plan"] > 0, "the limit was never felt"
        assert await visit(runtime, random.Random(0), 300) in {"done", "left"}, "an idle retry works"


async def test_a_small_limit_holds(folder_of: Callable[[str], Path]) -> None:
    await crowd(folder_of("llama"), 40, 700, 8 << 20)


@pytest.mark.heavy
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
async def test_a_small_limit_holds_for_200_requests(architecture: str, folder_of: Callable[[str], Path]) -> None:
    await crowd(folder_of(architecture), 200, 4000, 24 << 20)


async def test_what_can_never_fit_is_refused_before_any_work(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    limit = await limit_for(folder, 7 << 20)
    async with Runtime(model=str(folder), memory_limit_bytes=limit, prefix_cache_bytes=0) as runtime:
        troupe = runtime._supervisor.troupe
        assert troupe is not None
        most = troupe.row_limit_tokens
        assert most is not None
        assert 64 < most < 4000
        with pytest.raises(InvalidRequest) as caught:
            await runtime.complete(Generation(tokens=(20,) * most, sampling=GREEDY, max_tokens=1))
        assert caught.value.code == "memory_limit_exceeded"
        assert caught.value.param == "prompt"
        assert "raise memory_limit_bytes" in caught.value.message
        fits = await runtime.complete(
            Generation(tokens=(20,) * (most - 8), sampling=GREEDY, max_tokens=8, ignore_eos=True)
        )
        assert fits.usage.completion_tokens == 8
        open_ended = await runtime.complete(Generation(tokens=(20,) * (most - 8), sampling=GREEDY, ignore_eos=True))
        assert open_ended.usage.completion_tokens == 8, "without max_tokens the rest of what fits"


async def test_rows_that_outgrow_the_plan_are_put_back_and_stay_equal(
    folder_of: Callable[[str], Path], alone: Callable[[str, list[int], int], list[int]]
) -> None:
    """Ten rows are let in at a planned length and grow past it: some wait, and none loses or repeats a token."""
    folder = folder_of("llama")
    prompts = [[20 + index, 30, 40 + index] for index in range(10)]
    async with Runtime(model=str(folder), prefix_cache_bytes=0, length_classes=(), max_tokens_default=700) as runtime:
        troupe = runtime._supervisor.troupe
        assert troupe is not None
        guard = troupe.cast.decode.core._guard
        assert guard is not None
        facts = runtime._supervisor.loaded.facts  # type: ignore[union-attr]
        guard.line_bytes = facts.base_bytes + (3 << 20)
        found = await asyncio.gather(
            *(runtime.complete(Generation(tokens=tuple(p), sampling=GREEDY, ignore_eos=True)) for p in prompts)
        )
        assert runtime.statistics().preempted > 0
    for prompt, completion in zip(prompts, found, strict=True):
        assert list(completion.choices[0].tokens) == alone("llama", prompt, 700)
