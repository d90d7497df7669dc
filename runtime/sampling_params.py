"""What a client may ask of the sampler: plain data, no MLX, checked once at the door."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from .errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_TOP_LOGPROBS = 20
MAX_PENALTY_WINDOW_TOKENS = 4096
MAX_BIASED_TOKENS = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one row picks its next token.

    The order of the steps is mlx-lm's: bias and penalties on the logits, then top-p, min-p, XTC and top-k on the
    untempered log-probabilities, and the temperature last.

    Attributes:
        temperature: 0 is greedy; otherwise log-probabilities are divided by it, 0..2 for clients, any >= 0 here.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose mass reaches this share; 1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one; 0 drops none.
        xtc_probability: chance, per token, that XTC applies; 0 is never.
        xtc_threshold: XTC drops all but the least likely of the tokens above this probability, 0..0.5.
        repetition_penalty: divides positive and multiplies negative logits of recent tokens; 1 does nothing.
        repetition_window: how many recent tokens (prompt and output) count, likewise for the two below.
        presence_penalty: subtracted once from each token seen in its window; 0 does nothing.
        frequency_penalty: subtracted once per occurrence in its window; 0 does nothing.
        logit_bias: pairs of token id and the amount added to its logit.
        suppressed: token ids that are never sampled.
        seed: fixes the row's randomness whatever its neighbours; None lets the facade draw one.
        top_logprobs: None reports no log-probabilities; n >= 0 reports the chosen token's and the n best.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_window: int = 20
    presence_penalty: float = 0.0
    presence_window: int = 20
    frequency_penalty: float = 0.0
    frequency_window: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppressed: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True when no randomness is used."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True when the row needs the history of its tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the parameter, unless every value is in range.

        Args:
            vocab_size: number of rows of the model's output; token ids must lie below it.
        """
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0, 2**31)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _check_range("xtc_threshold", self.xtc_threshold, 0.0, 0.5)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for name in ("repetition_window", "presence_window", "frequency_window"):
            _check_range(name, getattr(self, name), 1, MAX_PENALTY_WINDOW_TOKENS)
        if self.top_logprobs is not None:
            _check_range("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias names more than {MAX_BIASED_TOKENS} tokens", param="logit_bias")
        if any(not math.isfinite(bias) for _, bias in self.logit_bias):
            raise InvalidRequest("logit_bias values must be finite numbers", param="logit_bias")
        check_token_ids((token for token, _ in self.logit_bias), vocab_size, "logit_bias")
        check_token_ids(self.suppressed, vocab_size, "suppressed")


def check_token_ids(tokens: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest unless every id lies in [0, vocab_size): MLX reads outside memory otherwise."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"token id {token} is outside the vocabulary of {vocab_size}", param=param)


def _check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:  # NaN compares false and is refused too
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)
