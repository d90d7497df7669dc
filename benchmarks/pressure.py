"""Fairness under pressure: two long prompts at once, with so little memory that their chunks are made shorter.

    python -m benchmarks.compare --model MODEL --peers PEERS --servers troupe,rapid --scenarios pressure

Ours is started with a memory limit: what it takes when idle, and `--pressure-mib` for all its requests. A stream runs
on it, two long prompts arrive together, then a short request. The peers have no limit, and the same is asked of them
behind *one* long prompt; then both long prompts, so that the time these take can be compared. If memory was not felt
(its counters are read before and after: chunks made shorter or turned away, rows put back, admissions held for memory)
our result is not `valid`.

Where admission's reserve for a join is larger than any chunk's need, memory makes no chunk shorter while rows keep to
the plan. `--pressure-chunk 32` shows the worst that it can do: every chunk at its floor.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .fairness import FairnessPlan, FairnessResult, run_fairness
from .http_stream import connect
from .servers import Server
from .sse import whole_answer

if TYPE_CHECKING:
    from .http_stream import Target
    from .servers import Recipe, Site

PROMPTS = 2
LONG_WORDS = 2048
ADMISSION_SHARE = 0.9
"""Of the limit, what admission plans with (see runtime's memory limits)."""
COUNTERS = ("chunks", "throttled_chunks", "crowded_chunks", "preempted")
HOLDS = ("memory", "memory_plan", "reclaim")
FELT = {*COUNTERS[1:], *(f"held by {reason}" for reason in HOLDS)}


@dataclass(slots=True)
class PressureResult:
    """Seconds. `one` is what the long prompt took alone, for servers that were asked for that."""

    running_longest_gap_s: float
    short_first_token_s: float | None
    first_long_s: float | None
    second_long_s: float | None
    one_long_s: float | None
    long_prompt_tokens: int | None
    valid: bool
    errors: list[str]
    memory: dict[str, Any] = field(default_factory=dict)


def limited(recipe: Recipe, site: Site, room_mib: int, chunk_tokens: int, timeout_s: float) -> Recipe:
    """Our recipe with a memory limit: what an idle server takes, and `room_mib` that requests may be planned with.

    `chunk_tokens` is the longest chunk; 0 leaves that to the server.
    """
    with Server(recipe, site) as server:
        asyncio.run(server.healthy(timeout_s))
        base_bytes = asyncio.run(_status(server.target))["memory"]["base_bytes"]
    limit = int((base_bytes + (room_mib << 20)) / ADMISSION_SHARE)
    chunk = f" --prefill-chunk-tokens {chunk_tokens}" if chunk_tokens else ""
    return replace(recipe, command=f"{recipe.command} --memory-limit-bytes {limit}{chunk}")


async def run_pressure(target: Target, plan: FairnessPlan, *, ours: bool) -> PressureResult:
    """Two long prompts on ours; on a peer one, and then two."""
    if not ours:
        one = await run_fairness(target, replace(plan, salt=f"{plan.salt}-one"))
        two = await run_fairness(target, replace(plan, long_prompts=PROMPTS))
        return _result(two, gaps=one)
    before = _counters(await _status(target))
    two = await run_fairness(target, replace(plan, long_prompts=PROMPTS))
    after = _counters(await _status(target))
    result = _result(two)
    result.memory = {name: count - before.get(name, 0) for name, count in after.items()}
    result.valid = result.valid and any(result.memory[name] for name in result.memory if name in FELT)
    return result


def _result(two: FairnessResult, gaps: FairnessResult | None = None) -> PressureResult:
    shown = gaps or two
    firsts = [*two.long_first_tokens_s, None, None]
    return PressureResult(
        running_longest_gap_s=shown.running_longest_gap_s,
        short_first_token_s=shown.short_first_token_s,
        first_long_s=firsts[0],
        second_long_s=firsts[1],
        one_long_s=None if gaps is None else gaps.long_first_token_s,
        long_prompt_tokens=two.long_prompt_tokens,
        valid=two.valid and shown.valid,
        errors=two.errors + (gaps.errors if gaps else []),
    )


def _counters(status: dict[str, Any]) -> dict[str, int]:
    """What tells that memory was felt, the holds of admission by reason included."""
    statistics = status["statistics"]
    holds = {f"held by {reason}": count for reason, count in statistics["holds"].items()}
    return {name: statistics[name] for name in COUNTERS} | holds


async def _status(target: Target) -> dict[str, Any]:
    exchange = await connect(target)
    exchange.send(target.get("/v1/troupe/status"))
    await exchange.finished(10.0)
    code, body = whole_answer(exchange)
    if code != 200:
        raise ValueError(f"the status answers {code}: {body[:200]!r}")
    answer: dict[str, Any] = json.loads(body)
    return answer
