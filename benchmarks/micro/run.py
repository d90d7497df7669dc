"""`mlx-troupe bench micro`: every part, or some, in one table with the machine's rates above it."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mlx_troupe.runtime.models.blas import load_blas

from ..reports.table import aligned

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from .case import Case
    from .machine import MachineRates

PARTS = ("step", "join", "sampling", "mask", "tree", "hop", "detokenise", "sse", "frame")
DTYPES = {"cpu": "float32"}
"""Where bfloat16 products do not go to the fast library."""


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError, naming the option."""
    parts_of(arguments.parts)
    for flag, text in (("--rows", arguments.rows), ("--contexts", arguments.contexts)):
        _numbers(flag, text)
    if arguments.repeats < 1 or arguments.vocab < 300:
        raise ValueError("--repeats is at least 1 and --vocab at least 300")
    if arguments.json and not Path(arguments.json).resolve().parent.is_dir():
        raise ValueError(f"{arguments.json}: its folder does not exist")


def run(arguments: argparse.Namespace) -> int:
    """Measure the parts and print the table. MLX work runs on this thread."""
    load_blas()
    from mlx_troupe.runtime.engine.device import backend

    from .machine import measure_rates

    dtype = DTYPES.get(backend(), "bfloat16")
    rates = measure_rates(dtype)
    cases = []
    for case in _cases(arguments, rates, dtype):
        cases.append(case)
        print(f"{case.part}: {case.case}", file=sys.stderr, flush=True)
    if arguments.json:
        found = {"rates": msgspec.to_builtins(rates), "cases": msgspec.to_builtins(cases)}
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    print(table(rates, cases), flush=True)
    return 0


def parts_of(text: str | None) -> tuple[str, ...]:
    """The parts to run. Raises ValueError for one that is not known."""
    if not text:
        return PARTS
    chosen = tuple(text.split(","))
    if unknown := [part for part in chosen if part not in PARTS]:
        raise ValueError(f"--parts: unknown {unknown[0]!r}; known: {', '.join(PARTS)}")
    return chosen


def _cases(arguments: argparse.Namespace, rates: MachineRates, dtype: str) -> Iterator[Case]:
    from . import frames, host, sampling, steps

    parts = parts_of(arguments.parts)
    rows, contexts = _numbers("--rows", arguments.rows), _numbers("--contexts", arguments.contexts)
    repeats, vocab = arguments.repeats, arguments.vocab
    if {"step", "join"} & set(parts):
        bench = steps.StepBench(_model(arguments.shape, vocab, dtype), vocab)
    every = {
        "step": lambda: steps.step_cases(bench, rates, rows, contexts, repeats),
        "join": lambda: steps.join_cases(bench, rates, rows, contexts, repeats),
        "sampling": lambda: sampling.sampling_cases(rates, rows, vocab, repeats),
        "mask": lambda: sampling.mask_cases(rates, rows, vocab, repeats),
        "tree": lambda: host.tree_cases(rates, contexts, repeats),
        "hop": lambda: host.hop_cases(rates, repeats),
        "detokenise": lambda: host.detokenise_cases(rates, repeats),
        "sse": lambda: host.sse_cases(rates, repeats),
        "frame": lambda: frames.frame_cases(rates, repeats),
    }
    return itertools.chain.from_iterable(every[part]() for part in parts)


def _model(shape: str, vocab: int, dtype: str) -> object:
    import mlx.core as mx

    from ..decode_rows import build_model

    return build_model(shape, vocab, getattr(mx, dtype))


def _numbers(flag: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} takes numbers between commas, not {text!r}") from None
    if min(found) < 1:
        raise ValueError(f"{flag} takes numbers above 0, not {text!r}")
    return found


def table(rates: MachineRates, cases: list[Case]) -> str:
    """Rates, then a row a case: microseconds, floor, and how many times the floor that is."""
    lines = [
        f"device: {rates.device_bytes_s / 1e9:.3g} GB/s, {rates.device_flops_s / 1e9:.4g} GFLOP/s ({rates.dtype}); "
        f"host: {rates.host_bytes_s / 1e9:.3g} GB/s copied, {rates.call_s * 1e9:.3g} ns a Python call, "
        f"{rates.hop_s * 1e6:.3g} us a loop callback"
    ]
    rows = [["part | case", "measured us", "floor us", "x floor", "floor is"]]
    for case in cases:
        name = f"{case.part} | {case.case}"
        if case.skipped:
            rows.append([name, "-", "-", "-", f"not measured: {case.skipped}"])
            continue
        times = "-" if case.times_floor is None else f"{case.times_floor:.3g}"
        rows.append([name, f"{case.measured_s * 1e6:,.4g}", f"{case.floor_s * 1e6:,.3g}", times, case.floor])
    return "\n".join([*lines, "", aligned(rows)])
