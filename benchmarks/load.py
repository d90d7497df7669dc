"""A load test of any OpenAI-compatible server: N streams in a closed loop, M tokens a request.

    python -m benchmarks.load --url http://127.0.0.1:8080 --model default_model --streams 32 --tokens 64

Prints one JSON object. Completion tokens are the server's usage where it gives one, else the
events that carried text (`count_source`). Every stream is connected before the clock starts; the
clock stops when the last request ends. Gaps are pauses between arrivals of text, so a server that
delivers several tokens at once has fewer and longer ones (`tokens_per_arrival`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from .http_stream import Exchange, Target, add_target_arguments, connect
from .prompts import PATHS, Endpoint, Sampling, Shape, prompt_words, request_body, sampling_fields, words
from .sse import StreamRecord, decode
from .stats import summary_ms

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What every stream asks for. `salt` must differ between rounds on one server."""

    streams: int = 32
    tokens: int = 64
    requests_per_stream: int = 1
    endpoint: Endpoint = "chat"
    sampling: Sampling = "greedy"
    prompts: Shape = "fixed"
    base_words: int = 16
    ignore_eos: bool = True
    """Ask for full length; servers that do not know the field end early on a real model."""
    salt: str = "0"
    timeout_s: float = 300.0

    def request(self, target: Target, stream: int, turn: int) -> bytes:
        """Request number `turn` of stream number `stream`."""
        count = prompt_words(stream, self.streams, self.prompts, self.base_words)
        prompt = words(count, f"{self.salt}-{stream}-{turn}")
        fields = sampling_fields(stream, self.sampling)
        if self.ignore_eos:
            fields["ignore_eos"] = True
        body = request_body(self.endpoint, prompt, self.tokens, fields)
        return target.request(PATHS[self.endpoint], body)


@dataclass(slots=True)
class LoadResult:
    """Figures of one load; times of the client, in the units their names say."""

    tokens_per_s: float
    wall_s: float
    tokens: int
    requests: int
    prompt_tokens: int
    count_source: str
    tokens_per_arrival: float
    first_token_ms: dict[str, float | None]
    gap_ms: dict[str, float | None]
    short_requests: int
    finish_reasons: dict[str, int]
    errors: dict[str, int]
    client_cpu_s: float
    plan: LoadPlan = field(default_factory=LoadPlan)


async def run_load(target: Target, plan: LoadPlan) -> LoadResult:
    """Run the plan against the target. Raises OSError if the first connections fail."""
    first = [await connect(target) for _ in range(plan.streams)]
    with _no_garbage_collection():
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(_run_stream(target, plan, i, first[i])) for i in range(plan.streams)]
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    records = [decode(exchange) for task in streams for exchange in task.result()]
    return _summarise(records, plan, wall_s, cpu_s)


async def _run_stream(target: Target, plan: LoadPlan, stream: int, first: Exchange) -> list[Exchange]:
    """One client: sends a request, reads it to its end, sends the next."""
    done: list[Exchange] = []
    for turn in range(plan.requests_per_stream):
        try:
            exchange = await connect(target) if done else first
        except OSError as error:
            exchange = Exchange()
            exchange.close(f"no connection: {error}")
        else:
            exchange.send(plan.request(target, stream, turn))
            await exchange.finished(plan.timeout_s)
        done.append(exchange)
    return done


def _summarise(records: list[StreamRecord], plan: LoadPlan, wall_s: float, cpu_s: float) -> LoadResult:
    tokens = sum(record.tokens for record in records)
    arrivals = sum(len(set(record.text_times_s)) for record in records)
    gaps_s = [gap for record in records for gap in record.gaps_s()]
    firsts_s = [record.first_token_s for record in records if record.first_token_s is not None]
    sources = {"chunks" if record.usage_tokens is None else "usage" for record in records if record.tokens}
    return LoadResult(
        tokens_per_s=round(tokens / wall_s, 2),
        wall_s=round(wall_s, 3),
        tokens=tokens,
        requests=len(records),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in records),
        count_source="+".join(sorted(sources)),
        tokens_per_arrival=round(tokens / max(1, arrivals), 3),
        first_token_ms=summary_ms(firsts_s),
        gap_ms=summary_ms(gaps_s),
        short_requests=sum(record.tokens < plan.tokens for record in records),
        finish_reasons=dict(Counter(record.finish_reason or "none" for record in records)),
        errors=dict(Counter(record.error for record in records if record.error)),
        client_cpu_s=round(cpu_s, 3),
        plan=plan,
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the client would show up as a gap of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `plan_from` reads."""
    default = LoadPlan()
    parser.add_argument("--streams", type=int, default=default.streams, help="concurrent clients")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="max_tokens of each request")
    parser.add_argument("--requests", type=int, default=default.requests_per_stream, help="per stream")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default=default.endpoint)
    parser.add_argument("--prompts", choices=("fixed", "ragged"), default=default.prompts)
    parser.add_argument("--words", type=int, default=default.base_words, help="words of the shortest prompt")
    parser.add_argument("--honour-eos", action="store_true", help="do not send ignore_eos")
    parser.add_argument("--timeout", type=float, default=default.timeout_s, help="seconds for one request")


def plan_from(options: argparse.Namespace, sampling: Sampling, salt: str) -> LoadPlan:
    """The plan that the options of `add_plan_arguments` describe."""
    return LoadPlan(
        streams=options.streams,
        tokens=options.tokens,
        requests_per_stream=options.requests,
        endpoint=options.endpoint,
        sampling=sampling,
        prompts=options.prompts,
        base_words=options.words,
        ignore_eos=not options.honour_eos,
        salt=salt,
        timeout_s=options.timeout,
    )


def main() -> int:
    """Command line; exit status 1 if any request failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description="Load a server.")
    add_target_arguments(parser)
    parser.add_argument("--sampling", choices=("greedy", "mixed", "unseeded"), default="greedy")
    parser.add_argument("--salt", default=str(time.time_ns()), help="opens every prompt")
    add_plan_arguments(parser)
    options = parser.parse_args()
    plan = plan_from(options, options.sampling, options.salt)
    result = asyncio.run(run_load(Target.from_options(options), plan))
    print(json.dumps(asdict(result), indent=1))
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
