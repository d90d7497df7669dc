"""What one forward of a group of rows sees: offsets, write places and masks, each made once and shared by layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .deferred import MaskedFallback

if TYPE_CHECKING:
    from ..kernels import RaggedAttention
    from .plane import Plane


class PlaneView:
    """One plane during one forward of `tokens` tokens a row.

    Attributes:
        cursor: where to write. A host int: on CUDA a start array costs a copy of the buffer.
        low, high: places that any live query may see, the new ones included.
    """

    __slots__ = (
        "_lengths",
        "_live",
        "_masks",
        "_plane",
        "_starts",
        "_starts_arrays",
        "_place",
        "cursor",
        "high",
        "low",
        "tokens",
        "traced",
    )

    def __init__(self, plane: Plane, lengths: np.ndarray, live: np.ndarray, tokens: int) -> None:
        self._plane = plane
        self._lengths = lengths
        self._live = live
        self._masks: dict[tuple[int | None, bool], mx.array | str | None] = {}
        self._starts_arrays: dict[int | None, mx.array] = {}
        self._place: mx.array | None = None
        self.traced = False
        self.tokens = tokens
        self.cursor = plane.cursor
        visible = plane.span
        if plane.window is not None and plane.positions is None:
            visible = np.minimum(visible, plane.window - 1)
        self._starts = plane.cursor - visible
        self.low = int(self._starts[live].min(initial=plane.cursor))
        self.high = plane.cursor + tokens

    @property
    def takes_kernel(self) -> bool:
        """One query a row and no holes: what a ragged kernel is for (even rows too: it writes their entries itself)."""
        return self.tokens == 1 and self._plane.positions is None

    @property
    def place(self) -> mx.array:
        """Capacity and cursor, int32 (2,), for the kernel."""
        if self._place is None:
            self._place = mx.array([self._plane.capacity, self.cursor], dtype=mx.int32)
        return self._place

    def splits(self, kernel: RaggedAttention, kv_heads: int) -> int:
        """How the kernel shares out a row here. From the capacity, so that it seldom changes."""
        return kernel.splits(len(self._starts), kv_heads, self._plane.capacity)

    def trace(self, starts: mx.array, place: mx.array) -> None:
        """Stand in for this view while a step is traced: its arrays are the traced ones from now on."""
        self.traced = True
        self._starts_arrays = {self._plane.window: starts}
        self._place = place

    def starts(self, window: int | None) -> mx.array:
        """First place each slot sees, int32 (slots,), under the window of the asking layer."""
        window = window or self._plane.window
        if window not in self._starts_arrays:
            if self.traced:
                raise MaskedFallback(f"a layer asks for a window of {window}, its cache has {self._plane.window}")
            starts = self._starts
            if window is not None:
                starts = np.maximum(starts, self.high - window)
            self._starts_arrays[window] = mx.array(np.maximum(starts, self.low).astype(np.int32))
        return self._starts_arrays[window]

    def mask(self, window: int | None, *, as_array: bool) -> mx.array | str | None:
        """The mask for mlx-lm's attention: None, "causal", or bool (slots, 1, tokens, high - low).

        Args:
            window: window of the asking layer; None takes the plane's.
            as_array: the caller cannot take None or "causal".
        """
        window = window or self._plane.window
        key = (window, as_array)
        if key not in self._masks:
            self._masks[key] = self._mask(window, as_array)
        return self._masks[key]

    def _mask(self, window: int | None, as_array: bool) -> mx.array | str | None:
        plane, tokens = self._plane, self.tokens
        if plane.positions is not None:
            return self._mask_with_holes(plane.positions, window)
        starts = np.maximum(self._starts, self.low)
        even = bool((starts[self._live] == self.low).all())
        clipped = window is not None and self.high - self.low > window
        if even and not clipped and not as_array:
            return None if tokens == 1 else "causal"
        places = mx.arange(self.low, self.high)
        seen = places >= mx.array(starts)[:, None]
        if tokens == 1:
            if clipped and window is not None:
                seen = seen & (places > plane.cursor - window)
            return seen[:, None, None, :]
        own = mx.arange(plane.cursor, self.high)[:, None]
        order = places <= own
        if window is not None:
            order = order & (places > own - window)
        return seen[:, None, None, :] & order

    def _mask_with_holes(self, positions: np.ndarray, window: int | None) -> mx.array:
        cursor, tokens = self._plane.cursor, self.tokens
        new = self._lengths[:, None] + np.arange(tokens)
        keys = np.concatenate([positions[:, self.low : cursor], new], axis=1)[:, None, :]
        queries = new[:, :, None]
        seen = (keys >= 0) & (keys <= queries)
        if window is not None:
            seen &= queries - keys < window
        return mx.array(seen[:, None])


class GroupView:
    """One forward of a group: positions of its queries and the views of its planes."""

    __slots__ = ("_planes", "offset", "offsets", "tokens")

    def __init__(self, planes: dict[int | None, Plane], lengths: np.ndarray, live: np.ndarray, tokens: int) -> None:
        self.tokens = tokens
        self.offsets = lengths
        self.offset = mx.array(lengths.astype(np.int32))
        self._planes = {window: PlaneView(plane, lengths, live, tokens) for window, plane in planes.items()}

    def planes(self) -> list[PlaneView]:
        """All of them, in an order that stays."""
        return list(self._planes.values())

    def plane(self, window: int | None) -> PlaneView:
        """The view of the plane with this window."""
        return self._planes[window]
