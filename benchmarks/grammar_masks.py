"""Host time of masks: rows with a schema each, over a vocabulary as large as Qwen's.

python -m benchmarks.grammar_masks --rows 32 --vocab 151936 --steps 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from statistics import median

import numpy as np

from mlx_troupe.runtime.grammar import Grammar, GrammarService


def tokens_of(size: int, rng: random.Random) -> list[bytes]:
    """All bytes, then words such as a tokenizer has, with blanks, quotes and digits among them; the last ends."""
    letters = "aaeeiioouutnsrhldcmfpgwyb"
    tokens = [bytes([byte]) for byte in range(256)]
    seen = set(tokens)
    while len(tokens) < size - 1:
        word = "".join(rng.choice(letters) for _ in range(rng.randrange(2, 9)))
        shape = rng.random()
        text = f" {word}" if shape < 0.5 else word if shape < 0.9 else f'"{word}' if shape < 0.95 else f'{word}":'
        token = text.encode()
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    return [*tokens, b"<end>"]


def schema(number: int) -> str:
    """One of many schemas: strings, numbers, enums, nested objects and lists."""
    inner = {"type": "object", "properties": {f"k{number}": {"type": "string"}}, "required": [f"k{number}"]}
    properties = {
        f"name{number}": {"type": "string", "minLength": 200},
        "count": {"type": "integer"},
        "kind": {"enum": [f"a{number}", "b", "c"]},
        "parts": {"type": "array", "items": inner},
    }
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


async def measure(rows: int, vocab: int, steps: int) -> None:
    """Print seconds of opening, compiling and masks."""
    rng = random.Random(1)
    tokens = tokens_of(vocab, rng)
    service = GrammarService(lambda: tokens, frozenset({vocab - 1}), frozenset({vocab - 1}))
    began = time.perf_counter()
    await service.constraints(Grammar("json_object"), 1)
    print(f"tokenizer {time.perf_counter() - began:.3f} s")
    began = time.perf_counter()
    constraints = [(await service.constraints(Grammar("json_schema", schema(row)), 1))[0] for row in range(rows)]
    print(f"compile {(time.perf_counter() - began) / rows * 1000:.2f} ms a schema")
    words = np.zeros((rows, -(-vocab // 32)), np.uint32)
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        for row, constraint in enumerate(constraints):
            constraint.fill(words[row])
        times.append(time.perf_counter() - began)
        for row, constraint in enumerate(constraints):
            allowed = np.flatnonzero(np.unpackbits(words[row].view(np.uint8), bitorder="little"))
            constraint.accept(int(rng.choice(allowed)))
    times.sort()
    print(
        f"masks of {rows} rows: median {median(times) * 1000:.2f} ms, p90 {times[len(times) * 9 // 10] * 1000:.2f} ms"
    )
    service.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--steps", type=int, default=64)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.rows, arguments.vocab, arguments.steps))
