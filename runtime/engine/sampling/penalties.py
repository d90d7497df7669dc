"""Penalties on recent tokens, and the windows of tokens they look at.

Penalties work on the flat (B * V,) float32 logits at int32 places slot * V + token, so that only the tokens seen are
touched, whatever the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rows import Row


class TokenWindow(NamedTuple):
    """A row's window: one line of a (rows, W) int32 array, often shared with other rows."""

    tokens: mx.array
    line: int

    def rewound(self, count: int) -> TokenWindow:
        """The window without its `count` newest tokens."""
        kept = self.tokens[self.line : self.line + 1, : self.tokens.shape[-1] - count]
        return TokenWindow(mx.concatenate([mx.full((1, count), -1, dtype=mx.int32), kept], axis=1), 0)


def open_window(history: Sequence[int], width: int, vocab_size: int) -> TokenWindow:
    """A window of the last `width` tokens of `history`."""
    recent = np.array(history[-width:], dtype=np.int64)
    tokens = np.full((1, width), -1, dtype=np.int32)
    tokens[0, width - len(recent) :] = np.where((recent >= 0) & (recent < vocab_size), recent, -1)
    return TokenWindow(mx.array(tokens), 0)


class Penalty(NamedTuple):
    """One kind of penalty for the rows of a window group.

    Attributes:
        kind: "repetition", "presence" or "frequency".
        strength: (rows, 1) float32; neutral for rows without it.
        window: (rows, W) bool, the columns of the token window that count.
    """

    kind: str
    strength: mx.array
    window: mx.array


class _Places(NamedTuple):
    """Where a window's tokens lie in the flat logits.

    Columns that do not count repeat the place of one that does, so that a gather, a change and a scatter write equal
    values to equal places.

    Attributes:
        flat: (rows, W) int32.
        counts: (rows, W) bool, true for the columns that count.
        any_counts: (rows, 1) bool.
    """

    flat: mx.array
    counts: mx.array
    any_counts: mx.array


class PenaltyGroup:
    """Token windows of rows whose windows share one width, on the device because the newest token is lazy.

    A window holds a row's last tokens, prompt and output, newest in the last column, -1 where there are none or where
    the token lies outside the vocabulary.
    """

    def __init__(self, rows: Sequence[Row], slots: Sequence[int], vocab_size: int) -> None:
        """Gather the windows of penalised rows; `slots` are their places in the batch."""
        windows = [window for row in rows if (window := row.window) is not None]
        order = sorted(range(len(rows)), key=lambda i: id(windows[i].tokens))
        self.rows = [rows[i] for i in order]
        self.tokens = _gather([windows[i] for i in order])
        for row in rows:
            row.window = None
        taken = np.array([slots[i] for i in order], dtype=np.int32)
        self._slots = mx.array(taken)
        self._starts = mx.array(taken[:, None] * vocab_size)
        self._penalties = _build_penalties(self.rows, self.tokens.shape[-1])

    def apply(self, flat: mx.array) -> mx.array:
        """Penalise in mlx-lm's order: repetition (https://arxiv.org/abs/1909.05858), presence, frequency.

        Repetition divides positive and multiplies negative logits of the tokens seen; presence subtracts once from
        each of them; frequency subtracts once per occurrence.
        """
        window, places = None, None
        for penalty in self._penalties:
            if places is None or penalty.window is not window:
                window, places = penalty.window, self._places(penalty.window)
            flat = _penalise(flat, penalty, places)
        return flat

    def append(self, tokens: mx.array) -> None:
        """Shift the step's lazy tokens, (B,) int32 in batch order, into the windows."""
        newest = mx.take(tokens, self._slots)[:, None]
        self.tokens = mx.concatenate([self.tokens[:, 1:], newest], axis=1)

    def release(self) -> None:
        """Give the rows their windows back."""
        for line, row in enumerate(self.rows):
            row.window = TokenWindow(self.tokens, line)

    def _places(self, window: mx.array) -> _Places:
        seen = mx.where(window, self.tokens, -1)
        anchor = seen.max(axis=-1, keepdims=True)
        counts = seen >= 0
        flat = self._starts + mx.where(counts, seen, mx.maximum(anchor, 0))
        return _Places(flat, counts, anchor >= 0)


def _gather(windows: Sequence[TokenWindow]) -> mx.array:
    """Stack windows; those of one array must be neighbours. (rows, W)."""
    parts: list[mx.array] = []
    start = 0
    for end in range(1, len(windows) + 1):
        if end == len(windows) or windows[end].tokens is not windows[start].tokens:
            lines = mx.array([window.line for window in windows[start:end]], dtype=mx.int32)
            parts.append(mx.take(windows[start].tokens, lines, axis=0))
            start = end
    return mx.concatenate(parts, axis=0)


def _build_penalties(rows: Sequence[Row], width: int) -> list[Penalty]:
    params = [row.params for row in rows]
    asked = (
        ("repetition", 1.0, [(p.repetition_penalty, p.repetition_window) for p in params]),
        ("presence", 0.0, [(p.presence_penalty, p.presence_window) for p in params]),
        ("frequency", 0.0, [(p.frequency_penalty, p.frequency_window) for p in params]),
    )
    windows: dict[tuple[int, ...], mx.array] = {}
    penalties = []
    for kind, neutral, settings in asked:
        if all(strength == neutral for strength, _ in settings):
            continue
        spans = tuple(span for _, span in settings)
        if spans not in windows:
            windows[spans] = mx.array(np.arange(width) >= width - np.array(spans)[:, None])
        strength = mx.array([[strength] for strength, _ in settings], dtype=mx.float32)
        penalties.append(Penalty(kind, strength, windows[spans]))
    return penalties


def _penalise(flat: mx.array, penalty: Penalty, places: _Places) -> mx.array:
    if penalty.kind == "frequency":
        return flat.at[places.flat].add(mx.where(places.counts, -penalty.strength, 0.0))
    before = mx.take(flat, places.flat)
    if penalty.kind == "repetition":
        after = mx.where(before < 0, before * penalty.strength, before / penalty.strength)
    else:
        after = before - penalty.strength
    after = mx.where(places.any_counts, after, before)
    return mx.put_along_axis(flat, places.flat.reshape(-1), after.reshape(-1), axis=0)
