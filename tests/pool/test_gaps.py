"""How long a stream of one model stands still while another model loads, or computes long prompts. Timed, so heavy."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.pool.settings import PooledModel
from tests.models.tiny import build_tiny

from .test_sockets import User, pooled, serving

STALL_S = 0.5
TARGET_S = RuntimeConfig().stall_target_s


def longest(stamps: list[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(stamps))


def median(stamps: list[float]) -> float:
    gaps = sorted(after - before for before, after in itertools.pairwise(stamps))
    return gaps[len(gaps) // 2]


async def until_text(stamps: list[float], count: int) -> None:
    while len(stamps) < count:  # noqa: ASYNC110 as a user would, who has no event
        await asyncio.sleep(0.005)


def real(name: str) -> PooledModel:
    """The demo model, if it is on this disk."""
    config = RuntimeConfig(model="demo", served_name=name, max_rows=4, prefix_cache_bytes=0)
    return PooledModel(name=name, config=config)


@pytest.fixture
def tiny(tmp_path):
    return build_tiny("llama", tmp_path / "tiny")


@pytest.mark.heavy
async def test_a_stream_goes_on_while_a_real_model_loads(tiny, capsys):
    async with serving(pooled(tiny, "tiny"), real("real")) as user:
        await user.stream("tiny", 2)
        stamps: list[float] = []
        streams = asyncio.ensure_future(keep_streaming(user, stamps))
        await until_text(stamps, 50)
        begun = len(stamps)
        status, answer = await user.text("real", tokens=1)
        assert status == 200, answer
        streams.cancel()
        with capsys.disabled():
            print(f"\nwhile loading: longest gap {longest(stamps[begun:]):.3f} s, median {median(stamps):.4f} s")
        assert longest(stamps[begun:]) < STALL_S


async def keep_streaming(user: User, stamps: list[float]) -> None:
    while True:
        await user.stream("tiny", 400, stamps)


@pytest.mark.heavy
async def test_a_stream_goes_on_while_another_model_computes_long_prompts(tiny, capsys):
    async with serving(pooled(tiny, "tiny"), real("real")) as user:
        await user.stream("tiny", 2)
        assert (await user.text("real", tokens=1))[0] == 200
        stamps: list[float] = []
        streams = asyncio.ensure_future(keep_streaming(user, stamps))
        await until_text(stamps, 50)
        begun = len(stamps)
        prompt = [1000 + place % 500 for place in range(1500)]
        status, _ = await user.text("real", tokens=1, prompt=prompt)
        assert status == 200
        streams.cancel()
        with capsys.disabled():
            print(f"\nbehind a prompt: longest gap {longest(stamps[begun:]):.3f} s, median {median(stamps):.4f} s")
        assert longest(stamps[begun:]) < STALL_S + TARGET_S
