"""Figures of one repeat, from its outcomes and the server's own metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from ..stats import summary_ms
from .outcome import error_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .objective import Objective
    from .outcome import Outcome

Spread = dict[str, float | None]
"""p50, p90, p99 and max, in milliseconds."""


class Sample(msgspec.Struct, frozen=True):
    """The server's metrics at one moment, seconds from the load's start."""

    at_s: float
    values: dict[str, float]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat.

    Attributes:
        wall_s: from the start to the last end.
        requests, completed, left: asked, ended well, disconnected on purpose.
        errors: by kind.
        tokens, prompt_tokens, cached_tokens: of all requests.
        tokens_per_s, requests_per_s: over the wall time; completed requests only for the latter.
        ttft_ms, gap_ms, per_token_ms, e2e_ms: of requests without an error, from the intended time.
        send_lag_ms: how late the client was; high values make the run worthless.
        goodput_per_s, goodput_share: requests that met the objective; the share is of those that did not leave.
        tokens_per_arrival: above 1 when a server delivers in bulk: its gaps are fewer and longer.
        count_source: "usage" when the server counted tokens, "pieces" when the client did.
        short: completed requests with fewer tokens than asked for.
        server: growth of the server's counters over the repeat, and highest values of its gauges (`..._max`).
    """

    wall_s: float
    requests: int
    completed: int
    left: int
    errors: dict[str, int]
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread
    gap_ms: Spread
    per_token_ms: Spread
    e2e_ms: Spread
    send_lag_ms: Spread
    goodput_per_s: float
    goodput_share: float
    tokens_per_arrival: float
    count_source: str
    short: int
    server: dict[str, float]


def summarise(
    outcomes: Sequence[Outcome], objective: Objective, samples: Sequence[Sample] = (), *, wall_s: float
) -> Figures:
    """All figures of one repeat of `wall_s` seconds."""
    well = [outcome for outcome in outcomes if not outcome.error]
    tokens = sum(outcome.tokens for outcome in outcomes)
    arrivals = sum(len(set(outcome.text_times_s)) for outcome in outcomes)
    met = sum(objective.met_by(outcome) for outcome in outcomes)
    stayed = sum(not outcome.left for outcome in outcomes)
    completed = sum(outcome.good for outcome in outcomes)
    counted = {outcome.counted_by_server for outcome in outcomes if outcome.tokens}
    return Figures(
        wall_s=round(wall_s, 4),
        requests=len(outcomes),
        completed=completed,
        left=sum(outcome.left for outcome in outcomes),
        errors=dict(Counter(error_kind(outcome.error) for outcome in outcomes if outcome.error)),
        tokens=tokens,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
        cached_tokens=sum(outcome.cached_tokens for outcome in outcomes),
        tokens_per_s=_rate(tokens, wall_s),
        requests_per_s=_rate(completed, wall_s),
        ttft_ms=summary_ms([value for outcome in well if (value := outcome.first_token_s) is not None]),
        gap_ms=summary_ms([gap for outcome in well for gap in outcome.gaps_s()]),
        per_token_ms=summary_ms([value for outcome in well if (value := outcome.per_token_s) is not None]),
        e2e_ms=summary_ms([outcome.whole_s for outcome in well if not outcome.left]),
        send_lag_ms=summary_ms([outcome.send_lag_s for outcome in outcomes]),
        goodput_per_s=_rate(met, wall_s),
        goodput_share=round(met / stayed, 4) if stayed else 0.0,
        tokens_per_arrival=round(tokens / max(1, arrivals), 3),
        count_source="+".join("usage" if usage else "pieces" for usage in sorted(counted, reverse=True)),
        short=sum(outcome.good and outcome.tokens < outcome.wanted_tokens for outcome in outcomes),
        server=server_figures(samples),
    )


def server_figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Counters (`..._total`, histogram sums and counts) as growth from first to last sample, gauges as `NAME_max`."""
    if not samples:
        return {}
    first, last = samples[0].values, samples[-1].values
    found: dict[str, float] = {}
    for name in last:
        if name.endswith(("_total", "_sum", "_count")):
            found[name] = round(last[name] - first.get(name, 0.0), 6)
        else:
            found[f"{name}_max"] = max(sample.values.get(name, 0.0) for sample in samples)
    return found


def _rate(count: int, wall_s: float) -> float:
    return round(count / wall_s, 3) if wall_s > 0 else 0.0
