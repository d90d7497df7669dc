"""Vectorised sampling of one step: every row its own parameters and its own randomness, mlx-lm's distributions."""

from .logprobs import RowLogprobs
from .sampler import RowSampler, Sampled

__all__ = ["RowLogprobs", "RowSampler", "Sampled"]
