"""From a Grammar to an llguidance matcher. Runs on a grammar thread.

Whitespace between JSON tokens is bounded: one space, or one line end and up to 16 spaces. An unbounded rule lets a
model write blanks until its tokens are used up. `x-guidance` in a schema could change such rules, so it is dropped.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .spec import Grammar

WHITESPACE = r" ?|\n {0,16}"
MAX_ERROR_CHARACTERS = 300

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""About 20 ms of compiling at most, 15 ms of one mask, 100 MB of lexer states."""


class Vocabulary(TokenizerWrapper):
    """Every token's exact bytes, as llguidance wants to be given them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], end: Sequence[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special)
        self.eos_token_id = end[0]
        self._single = {token: place for place, token in reversed(list(enumerate(tokens))) if len(token) == 1}

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text, byte by byte; masks do not depend on it."""
        data = text.encode() if isinstance(text, str) else text
        return [self._single[bytes([byte])] for byte in data if bytes([byte]) in self._single]


def new_tokenizer(tokens: Sequence[bytes], special: Sequence[int], end: Sequence[int]) -> LLTokenizer:
    """The tokenizer behind all matchers of one model; takes some 0.3 s for 150,000 tokens.

    Args:
        tokens: bytes of each id; b"" for ids that may never be sampled.
        special: ids whose bytes are not text.
        end: ids that end the output; at least one.
    """
    return LLTokenizer(Vocabulary(tokens, special, end), n_vocab=len(tokens), eos_token=list(end))


def new_matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at its start. Raises InvalidRequest, naming the field, for a grammar that does not compile."""
    try:
        source = _source(grammar)
    except Exception as error:
        # Whatever the converters raise (ValueError, RecursionError, KeyError) follows from the client's text.
        raise grammar.refused(first_line(str(error) or type(error).__name__)) from None
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise grammar.refused(first_line(matcher.get_error()))
    # A schema such as {"$ref": "#"} compiles, and no text matches it.
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise grammar.refused(first_line(matcher.get_error()))
    if not any(mask) or matcher.stop_reason() not in GOOD_REASONS:
        raise grammar.refused("no text matches it")
    matcher.reset()
    return matcher


GOOD_REASONS = frozenset({"NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence"})


def first_line(error: str) -> str:
    """An llguidance error short enough for a client: what follows the first lines is the parser's state."""
    lines = [line.strip() for line in error.partition("<state>")[0].splitlines() if line.strip()]
    return " ".join(lines)[:MAX_ERROR_CHARACTERS] or "it cannot be compiled"


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "gbnf":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))
        case "choice":
            return LLMatcher.grammar_from_lark(_choice_lark(json.loads(grammar.text)))
        case "json_object":
            return _schema_source({"type": "object"}, lenient=False)
        case "json_schema":
            return _schema_source(json.loads(grammar.text), lenient=grammar.lenient)


def _schema_source(schema: dict[str, Any] | bool, *, lenient: bool) -> str:
    options: dict[str, Any] = {
        "whitespace_pattern": WHITESPACE,
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": lenient,
        "lenient": lenient,
    }
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]


def _choice_lark(choices: list[str]) -> str:
    """One of several texts, exactly."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
