"""A vocabulary of single bytes and a few longer tokens, and walks through grammars without a model."""

import random

import numpy as np

from mlx_troupe.runtime.grammar import GrammarService

END = 256
OTHER_END = 257
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>", b"<end2>", b'": "', b"  ", b"\n\n", b"null", b"", b""]
ENDS = frozenset({END, OTHER_END})


def service(**settings):
    return GrammarService(lambda: TOKENS, ENDS, ENDS, **settings)


def allowed(constraint) -> set[int]:
    words = np.zeros(-(-len(TOKENS) // 32), np.uint32)
    constraint.fill(words)
    return {token for token in range(len(TOKENS)) if words[token // 32] >> np.uint32(token % 32) & 1}


def walk(constraint, seed: int, most: int = 4000) -> bytes | None:
    """Random text of the grammar; None when it has not ended after `most` tokens."""
    rng = random.Random(seed)
    text = b""
    for _ in range(most):
        token = rng.choice(sorted(allowed(constraint)))
        constraint.accept(token)
        if token in ENDS:
            return text
        text += TOKENS[token]
    return None
