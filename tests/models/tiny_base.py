"""What the configurations of all tiny models share."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

HIDDEN = 64
WINDOW = 16
"""Sliding window and attention chunk of every tiny model, in tokens."""


def base_config(vocab: int, head_dim: int, **changes: Any) -> Config:
    heads = HIDDEN // head_dim
    config: Config = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config | changes
