"""The floor of host overhead: mlx-lm's model in a bare greedy loop, nothing around it.

    python -m benchmarks.bare_loop MODEL --rows 32 --steps 256

All rows have equal lengths, so plain `KVCache`s hold the batch. Each step runs the model, takes the
argmax and reads it with `tolist`. Preload a BLAS (`LD_PRELOAD`) as for the servers, or `--blas`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from . import blas

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.core as mx
    from mlx import nn

WARM_UP_STEPS = 16


def bare_loop_ms(model: nn.Module, rows: int, steps: int, prompt_len: int, *, pipelined: bool = False) -> float:
    """Milliseconds a step: the mean over `steps` after a warm-up, `rows` prompts of `prompt_len` tokens.

    `model` is mlx-lm's, as `mlx_lm.load` returns it. `pipelined` submits step k+1 before it reads
    step k, as mlx-lm's own generator does; plain is read, then submit.
    """
    step = _prefilled(model, rows, prompt_len)
    run = _pipelined if pipelined else _plain
    run(step, WARM_UP_STEPS)
    begin_s = time.perf_counter()
    run(step, steps)
    return (time.perf_counter() - begin_s) / steps * 1e3


def _prefilled(model: nn.Module, rows: int, prompt_len: int) -> Callable[[], mx.array]:
    """Prefill random prompts; the function returned builds the next step, tokens of shape [rows]."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    vocab = model.args.vocab_size
    prompt = mx.random.randint(0, vocab, (rows, prompt_len), key=mx.random.key(0))
    tokens = mx.argmax(model(prompt, cache=cache)[:, -1], axis=-1)
    mx.eval(tokens)

    def step() -> mx.array:
        nonlocal tokens
        tokens = mx.argmax(model(tokens[:, None], cache=cache)[:, -1], axis=-1)
        return tokens

    return step


def _plain(step: Callable[[], mx.array], steps: int) -> None:
    for _ in range(steps):
        step().tolist()


def _pipelined(step: Callable[[], mx.array], steps: int) -> None:
    import mlx.core as mx

    ahead = step()
    mx.async_eval(ahead)
    for _ in range(steps - 1):
        tokens, ahead = ahead, step()
        mx.async_eval(ahead)
        tokens.tolist()
    ahead.tolist()


def main() -> int:
    """Command line; prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_loop", description="Time a bare loop.")
    parser.add_argument("model", help="model folder")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blas", help="a BLAS library to load before MLX, such as libopenblas.so.0")
    options = parser.parse_args()
    if options.blas:
        blas.preload(options.blas)
    from mlx_lm import load

    model = load(options.model)[0]
    for pipelined in (False, True):
        rounds = [
            bare_loop_ms(model, options.rows, options.steps, options.prompt_len, pipelined=pipelined)
            for _ in range(options.rounds)
        ]
        best_ms = min(rounds)
        print(
            json.dumps(
                {
                    "pipelined": pipelined,
                    "rows": options.rows,
                    "ms_per_step": round(best_ms, 3),
                    "tokens_per_s": round(options.rows / best_ms * 1e3, 1),
                    "rounds_ms": [round(value, 3) for value in rounds],
                }
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
