"""Messages, socket writes and Python calls of a step and of a token, counted. No times."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
import pytest

from benchmarks.trace_summary import read_events
from mlx_troupe.actors.decode import DecodeActor
from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.api.sse import ChatChunkEncoder, StreamHead
from mlx_troupe.runtime import Generation, Runtime, SamplingParams
from mlx_troupe.runtime.events import TextDelta
from mlx_troupe.runtime.messages.executor import DropPages
from tests.actors.bench import Bench
from tests.actors.parts import make_row

from .counting import python_calls

TOKENS = 40
CLOCKED = ("Tick", "SampleMemory", "MemorySample", "SetMemoryLimit")
"""Messages that come by time, not by step."""
MOST_MESSAGES_A_REQUEST = 14
MOST_CORE_CALLS_A_ROW = 4
"""Decode's own Python calls for one row of one step: commit, text, event."""
MOST_CORE_CALLS_A_STEP = 30
MOST_ENCODE_CALLS = 3


async def messages_of(folder, path, rows: int) -> Counter[str]:
    """Messages by kind, of `rows` requests at once."""
    async with Runtime(model=folder, trace=str(path), prefix_cache_bytes=0) as runtime:

        async def one(row: int) -> None:
            prompt = tuple((7 * row + place) % 200 + 20 for place in range(12))
            sampling = SamplingParams(temperature=0.0)
            await runtime.complete(Generation(tokens=prompt, max_tokens=TOKENS, sampling=sampling, ignore_eos=True))

        await asyncio.gather(*(one(row) for row in range(rows)))
    spans = [event["name"] for event in read_events(path) if event["ph"] == "X" and ": " in event["name"]]
    return Counter(name for name in spans if not name.endswith(CLOCKED))


@pytest.mark.parametrize("rows", [1, 8])
async def test_two_messages_a_step_whatever_the_rows(rows, folder_of, tmp_path):
    found = await messages_of(str(folder_of("llama")), tmp_path / "trace.json", rows)
    steps = found["decode: StepResult"]
    assert TOKENS <= steps <= TOKENS + 3 * rows
    assert found["executor: StepPlan"] <= steps + 3 * rows + 2
    assert others(found) <= MOST_MESSAGES_A_REQUEST * rows


async def test_a_regression_in_messages_is_seen(folder_of, tmp_path, monkeypatch):
    """One message a row and step."""
    settle = DecodeActor.settle

    def chatty(actor: DecodeActor) -> None:
        settle(actor)
        for _ in range(actor.core.running):
            actor.executor.tell(DropPages(()))

    monkeypatch.setattr(DecodeActor, "settle", chatty)
    found = await messages_of(str(folder_of("llama")), tmp_path / "trace.json", 8)
    assert others(found) > MOST_MESSAGES_A_REQUEST * 8


def others(found: Counter[str]) -> int:
    """Messages besides plans and their results."""
    return sum(found.values()) - found["decode: StepResult"] - found["executor: StepPlan"]


async def test_one_socket_write_a_token_and_stream(folder_of, tmp_path):
    path = tmp_path / "trace.json"
    body = {"prompt": "hi", "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
    async with (
        Runtime(model=str(folder_of("llama")), trace=str(path)) as runtime,
        listening(runtime, ServerSettings(port=0, access_log=False)) as url,
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        assert response.status == 200
        await response.read()
    writes = [event for event in read_events(path) if event.get("name") == "socket write"]
    assert 0 < len(writes) <= TOKENS + 2


def core_calls(rows: int) -> float:
    """Python calls of decode's core for one step: commit of the last one and the next plan."""
    bench = Bench(page_tokens=0)
    for row in range(rows):
        bench.prefill(make_row([1 + row, 2], 200))
    total = 0
    for number in range(16):
        while True:
            with python_calls() as found:
                plan = bench.core.plan()
            total += sum(found.values()) if number >= 6 else 0
            if plan is None:
                break
            bench.engine.run(plan, bench.emitted.append)
        with python_calls() as found:
            bench.deliver()
        total += sum(found.values()) if number >= 6 else 0
    return total / 10


def test_decode_does_little_for_a_row():
    few, many = core_calls(4), core_calls(16)
    each = (many - few) / 12
    assert 0 < each <= MOST_CORE_CALLS_A_ROW
    assert few - 4 * each <= MOST_CORE_CALLS_A_STEP


def test_encoding_a_token_takes_few_calls():
    head = StreamHead(
        id="x", created=0, model="m", fingerprint="f", choices=1, prompts=1, include_usage=True, return_progress=False,
        reasoning_fields=(),
    )  # fmt: skip
    encoder = ChatChunkEncoder(head, lambda token: ("", b""))
    events = [TextDelta("word", (1,))]
    encoder.encode(events)
    with python_calls() as found:
        encoder.encode(events)
    assert 1 <= sum(found.values()) <= MOST_ENCODE_CALLS
