"""How one model writes thoughts and tool calls, read from its tokenizer once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .tokenizer_types import Wrapper

HARMONY = "harmony"
JSON_TOOLS = "json_tools"
HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
HARMONY_ANSWER = "<|channel|>final<|message|>"
# What parsers look for between the markers, where a tokenizer has it as one special token.
_INNER_MARKERS = (
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|open|>", "<|close|>", "<|sep|>",
    "[ARGS]", "[CALL_ID]", '<|"|>', "<escape>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>",
)  # fmt: skip

ParseCall = Callable[[str, Any], Any]


class ToolFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A way to write tool calls; an empty start is none at all."""

    name: str
    start: str = ""
    end: str = ""
    parse: ParseCall | None = None


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The marks around thoughts and tool calls.

    Attributes:
        think_start, think_end: texts around a thought; "" when the model has none.
        think_start_tokens, think_end_tokens: their token ids.
        line_tokens: token ids of a line end.
        parser: name of the tool-call format; "" when there is none.
        call_start, call_end: texts around tool calls; an empty end is the output's end.
        parse_call: mlx-lm's parser of what stands between them; raises whatever it likes.
        thought_ids, call_ids: special ids that belong to the marks, and must have text when one looks for them.
    """

    think_start: str = ""
    think_end: str = ""
    think_start_tokens: tuple[int, ...] = ()
    think_end_tokens: tuple[int, ...] = ()
    line_tokens: tuple[int, ...] = ()
    parser: str = ""
    call_start: str = ""
    call_end: str = ""
    parse_call: ParseCall | None = None
    thought_ids: frozenset[int] = frozenset()
    call_ids: frozenset[int] = frozenset()

    @property
    def thinks(self) -> bool:
        """Thoughts can be told from answers."""
        return bool(self.think_end_tokens)

    @property
    def harmony(self) -> bool:
        """Everything is written in channels."""
        return self.parser == HARMONY

    def opens_thought(self, prompt: list[int], *, continued: bool) -> bool:
        """Whether the prompt ends inside a thought; a continued message may have opened it long before."""
        if not self.think_start_tokens:
            return False
        tail = prompt if continued else prompt[-len(self.think_start_tokens) - 4 :]
        return _last(tail, self.think_start_tokens) > _last(tail, self.think_end_tokens)

    def closes_thought(self, prompt: list[int]) -> bool:
        """Whether the prompt ends with a thought that is over: the model was told not to think."""
        tail = prompt[-len(self.think_end_tokens) - 4 :]
        return bool(self.think_end_tokens) and _last(tail, self.think_end_tokens) >= 0


def read_dialect(wrapper: Wrapper, special: Iterable[int], chosen: ToolFormat | None = None) -> Dialect:
    """The dialect of mlx-lm's TokenizerWrapper; `chosen` overrides how it writes calls."""
    vocabulary = _vocabulary(wrapper)
    speaks_harmony = all(marker in vocabulary for marker in HARMONY_MARKERS[:5])
    if (speaks_harmony and chosen is None) or (chosen is not None and chosen.name == HARMONY):
        return _harmony(wrapper, vocabulary)
    calls = chosen or _own_format(wrapper)
    texts = {vocabulary_id: text for text, vocabulary_id in vocabulary.items()}
    marks = {token: texts.get(token, "") for token in special}
    start, end = getattr(wrapper, "think_start", None) or "", getattr(wrapper, "think_end", None) or ""
    return Dialect(
        think_start=start,
        think_end=end,
        think_start_tokens=tuple(getattr(wrapper, "think_start_tokens", None) or ()),
        think_end_tokens=tuple(getattr(wrapper, "think_end_tokens", None) or ()),
        line_tokens=_encoded(wrapper, "\n") if end else (),
        parser=calls.name if calls.start else "",
        call_start=calls.start,
        call_end=calls.end,
        parse_call=calls.parse if calls.start else None,
        thought_ids=frozenset(token for token, text in marks.items() if text and text in start + "\n" + end),
        call_ids=frozenset(
            token for token, text in marks.items() if text and (text in calls.start + "\n" + calls.end or _inner(text))
        ),
    )


def _own_format(wrapper: Wrapper) -> ToolFormat:
    """What mlx-lm found for this tokenizer."""
    parse = getattr(wrapper, "tool_parser", None)
    start, end = getattr(wrapper, "tool_call_start", None), getattr(wrapper, "tool_call_end", None)
    if parse is None or not start:
        return ToolFormat(name="")
    return ToolFormat(name=parse.__module__.rpartition(".")[2], start=start, end=end or "", parse=parse)


def _harmony(wrapper: Wrapper, vocabulary: dict[str, int]) -> Dialect:
    ids = frozenset(vocabulary[marker] for marker in HARMONY_MARKERS if marker in vocabulary)
    return Dialect(
        think_end=HARMONY_ANSWER,
        think_end_tokens=_encoded(wrapper, HARMONY_ANSWER),
        line_tokens=_encoded(wrapper, "<|end|><|start|>assistant"),
        parser=HARMONY,
        thought_ids=ids,
        call_ids=ids,
    )


def _vocabulary(wrapper: Wrapper) -> dict[str, int]:
    get = getattr(wrapper, "get_vocab", None)
    return dict(get()) if get is not None else {}


def _encoded(wrapper: Wrapper, text: str) -> tuple[int, ...]:
    return tuple(wrapper.encode(text, add_special_tokens=False))


def _inner(text: str) -> bool:
    return text in _INNER_MARKERS


def _last(tokens: list[int], sequence: tuple[int, ...]) -> int:
    """Where `sequence` begins last in `tokens`; -1 when nowhere."""
    length = len(sequence)
    if not length:
        return -1
    for place in range(len(tokens) - length, -1, -1):
        if tuple(tokens[place : place + length]) == sequence:
            return place
    return -1
