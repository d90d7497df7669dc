"""Where a prompt's KV is kept, and where its forward is split: pure functions of positions.

Models whose every layer can be cut keep whole pages, and the rest of the prompt as a tail. The others keep the same
pieces, but matches of them end at checkpoints only. Checkpoints cost much (the state of a recurrent model may weigh as
much as thousands of tokens), so they are spaced: one every few pages, by a budget of bytes a token; one where the tree
has seen prompts part; one at the start of the generation prompt, where the next turn of a conversation parts from this
one (or at the prompt's end, when that is not known).

The forward of such a model is split at every page boundary and at that last place, whether or not the cache is on: so
a hit computes what a miss does.
"""

from __future__ import annotations

import msgspec

CHECKPOINT_SHARE = 2.0
"""Checkpoints may take so many times what the KV of a page takes..."""
LEAST_BYTES = 4 << 20
"""...or of this, for models that have little or no other KV."""
TAIL_SHARE = 16
"""A tail shorter than this part of a page is not worth keeping."""


class KeepRules(msgspec.Struct, frozen=True):
    """Of one model.

    Attributes:
        page_tokens: tokens of a page; 0 keeps nothing.
        checkpoints: whether the model needs them.
        spacing_pages: a checkpoint every so many pages.
        cut_tokens: the forward is split at multiples of this; 0 is nowhere.
    """

    page_tokens: int
    checkpoints: bool = False
    spacing_pages: int = 1
    cut_tokens: int = 0


class KeepPlan(msgspec.Struct, frozen=True):
    """Of one prompt: where it is split, where pieces end, and which of these carry a checkpoint; all ascending."""

    cuts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    checkpoints: frozenset[int] = frozenset()


def spacing_pages(page_bytes: int, checkpoint_bytes: int) -> int:
    """Pages between two checkpoints, so that these take no more than their share."""
    allowed_bytes = max(page_bytes * CHECKPOINT_SHARE, LEAST_BYTES)
    return max(1, -(-checkpoint_bytes // int(allowed_bytes)))


def keep_plan(rules: KeepRules, target: int, turn_start: int | None, branch: int, *, cached: bool) -> KeepPlan:
    """What to keep of a prompt of which `target` tokens are computed.

    Args:
        turn_start: where the generation prompt begins, if known.
        branch: where other prompts went on beyond the last checkpoint; 0 is nowhere.
        cached: False keeps nothing (but splits all the same).
    """
    last = turn_start if rules.checkpoints and turn_start is not None and 0 < turn_start < target else target
    cuts = set(range(rules.cut_tokens, target, rules.cut_tokens)) if rules.cut_tokens else set()
    if rules.checkpoints and last < target:
        cuts.add(last)
    page = rules.page_tokens
    if not cached or not page or target < 1:
        return KeepPlan(tuple(sorted(cuts)))
    whole = range(page, target + 1, page)
    ends = set(whole)
    if last % page >= (1 if rules.checkpoints else max(1, page // TAIL_SHARE)):
        ends.add(last)
    if not rules.checkpoints:
        return KeepPlan((), tuple(sorted(ends)))
    every = page * rules.spacing_pages
    points = {end for end in ends if end % every == 0 or end in (branch, last)}
    return KeepPlan(tuple(sorted(cuts)), tuple(sorted(ends)), frozenset(points))
