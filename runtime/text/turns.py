"""What a chat template does to a conversation from one turn to the next: learnt once by rendering made-up turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..errors import TroupeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .service import TextService

THOUGHT, ANSWER = "qxjv", "zwkp"
MOST_OPENING_TOKENS = 6


class TurnFacts(msgspec.Struct, frozen=True):
    """Of one template.

    Attributes:
        generation_prompt: ids that it puts at the end for the assistant to go on from; empty when not known.
        dropped_reasoning: ids that open reasoning which it leaves out of later turns; empty when it keeps all.
    """

    generation_prompt: tuple[int, ...] = ()
    dropped_reasoning: tuple[int, ...] = ()

    def turn_start(self, prompt: Sequence[int]) -> int | None:
        """Where the generation prompt begins; None when `prompt` does not end with it."""
        count = len(self.generation_prompt)
        if not count or tuple(prompt[-count:]) != self.generation_prompt:
            return None
        return len(prompt) - count


async def learn_turns(text: TextService) -> TurnFacts:
    """Render made-up turns. A model without a template, or with one that refuses them, has no facts."""
    try:
        return TurnFacts(await _generation_prompt(text), await _dropped_reasoning(text))
    except TroupeError:
        return TurnFacts()


async def _generation_prompt(text: TextService) -> tuple[int, ...]:
    turn = [{"role": "user", "content": "a"}]
    bare = await text.render_chat(turn, add_generation_prompt=False)
    full = await text.render_chat(turn)
    return tuple(full[len(bare) :]) if full[: len(bare)] == bare else ()


async def _dropped_reasoning(text: TextService) -> tuple[int, ...]:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"},
        {"role": "user", "content": "b"},
    ]
    shown = await text.decode(await text.render_chat(turns), skip_special_tokens=False)
    if ANSWER not in shown or THOUGHT in shown:
        return ()
    opening = await text.encode("<think>", add_special_tokens=False)
    return tuple(opening) if len(opening) <= MOST_OPENING_TOKENS else ()
