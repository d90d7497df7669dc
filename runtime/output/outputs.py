"""From a request to what its rows need around their output: constraints, the text they show, and splitters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..constraint import Constraint
from ..errors import InvalidRequest
from ..grammar import Grammar, ThoughtPlan
from ..grammar.thought import ThoughtConstraint
from .forced import ForcedSplitter, forced_schema
from .harmony import HarmonySplitter
from .parts import Tools
from .splitter import Splitter, TaggedSplitter

if TYPE_CHECKING:
    from ..generation import Generation
    from ..grammar import GrammarService
    from ..text.dialect import Dialect


class Prepared(msgspec.Struct, frozen=True):
    """What one request's rows get.

    Attributes:
        constraints: one a row.
        shown: special ids that have text.
        new_splitter: makes a row's splitter; None leaves the output whole.
    """

    constraints: Sequence[Constraint | None]
    shown: frozenset[int] = frozenset()
    new_splitter: Callable[[], Splitter] | None = None


class Outputs:
    """Prepares outputs for one served model. Belongs to the event loop.

    Args:
        dialect: how the model writes thoughts and calls.
        grammars: compiles what constrains an output.
    """

    def __init__(self, dialect: Dialect, grammars: GrammarService) -> None:
        self.dialect = dialect
        self.grammars = grammars

    def close(self) -> None:
        """End the grammar threads."""
        self.grammars.close()

    async def prepare(self, generation: Generation, prompt: list[int]) -> Prepared:
        """Raises InvalidRequest, naming the field, for what cannot be had; Overloaded and NotReady as grammars do."""
        forced = generation.tool_choice in ("required", "named")
        grammar = _forced_grammar(generation) if forced else generation.grammar
        if grammar is not None and generation.ignore_eos:
            raise InvalidRequest(
                "a constrained output ends by itself: ignore_eos cannot be honoured", param="ignore_eos"
            )
        thought = self._thought(generation, prompt)
        constraints: list[Constraint | None] = [None] * generation.n
        if grammar is not None:
            constraints = list(await self.grammars.constraints(grammar, generation.n))
        if thought is not None and (grammar is not None or thought.budget is not None):
            end = self.grammars.end
            constraints = [ThoughtConstraint(thought, inner, end) for inner in constraints]
        nothing_to_find = not self.dialect.thinks and not generation.tools
        if generation.split == "none" or generation.messages is None or nothing_to_find:
            return Prepared(constraints)
        return Prepared(constraints, self._shown(generation), lambda: self._splitter(generation, prompt))

    def _shown(self, generation: Generation) -> frozenset[int]:
        dialect = self.dialect
        return dialect.thought_ids | (dialect.call_ids if generation.tools else frozenset())

    def _thought(self, generation: Generation, prompt: list[int]) -> ThoughtPlan | None:
        dialect = self.dialect
        if generation.messages is None or not dialect.thinks:
            return None
        is_open = dialect.harmony or dialect.opens_thought(prompt, continued=generation.continue_final_message)
        if not is_open and (dialect.closes_thought(prompt) or generation.continue_final_message):
            return None
        if dialect.harmony and generation.continue_final_message:
            return None
        return ThoughtPlan(
            is_open=is_open,
            start=dialect.think_start_tokens,
            end=dialect.think_end_tokens,
            closing=dialect.line_tokens + dialect.think_end_tokens,
            budget=generation.thinking_budget,
        )

    def _splitter(self, generation: Generation, prompt: list[int]) -> Splitter:
        tools = Tools(generation.tools) if generation.tools else None
        forced = generation.tool_choice in ("required", "named")
        eager = generation.split == "stream"
        inner = self._plain(generation, prompt, None if forced else tools, eager=eager)
        if not forced or tools is None:
            return inner
        return ForcedSplitter(inner, tools, generation.tool_name or None, eager=eager)

    def _plain(self, generation: Generation, prompt: list[int], tools: Tools | None, *, eager: bool) -> Splitter:
        continued = generation.continue_final_message
        if self.dialect.harmony:
            return HarmonySplitter(tools, opened=continued, eager=eager)
        in_thought = self.dialect.opens_thought(prompt, continued=continued)
        return TaggedSplitter(self.dialect, tools, in_thought=in_thought, eager=eager)


def _forced_grammar(generation: Generation) -> Grammar:
    if not generation.tools:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if generation.grammar is not None:
        raise InvalidRequest("tool_choice and a grammar both decide the output", param="tool_choice")
    name = generation.tool_name or None
    if name is not None and name not in Tools(generation.tools).names:
        raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is not among the tools", param="tool_choice")
    schema = forced_schema(generation.tools, name, parallel=generation.parallel_tool_calls)
    return Grammar("json_schema", json.dumps(schema), "tools", lenient=True)
