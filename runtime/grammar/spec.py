"""What a request may constrain its output to, and the bounds that are checked before anything is compiled."""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from ..errors import InvalidRequest, TroupeError

MAX_GRAMMAR_BYTES = 256 << 10
MAX_PATTERN_CHARACTERS = 8192
MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_CHOICES = 4096

Kind = Literal["json_object", "json_schema", "regex", "lark", "gbnf", "choice"]


class GrammarFailed(TroupeError):
    """A grammar reached a state it cannot go on from while its request was running."""

    code = "grammar_failed"


class Grammar(msgspec.Struct, frozen=True):
    """What the output must match.

    Attributes:
        kind: how `text` is read.
        text: a JSON schema, a regular expression, a Lark or GBNF grammar, or a JSON list of texts; "" for json_object.
        param: the request's field, for errors.
        lenient: a schema's unknown keywords are ignored instead of refused; for tool parameters only.
    """

    kind: Kind
    text: str = ""
    param: str = "response_format"
    lenient: bool = False

    def check(self) -> None:
        """Raise InvalidRequest unless this is within the bounds; takes time in proportion to the text."""
        if len(self.text.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR_BYTES:
            raise self.refused(f"it is larger than {MAX_GRAMMAR_BYTES} bytes")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise self.refused("it holds half of a surrogate pair")
        match self.kind:
            case "regex":
                self._check_pattern(self.text)
            case "json_schema":
                schema = self._parsed()
                if not isinstance(schema, dict | bool):
                    raise self.refused("a schema is an object")
                self._check_nodes(schema)
            case "choice":
                self._check_choices(self._parsed())
            case _:
                pass

    def refused(self, why: str) -> InvalidRequest:
        """The error for a grammar that cannot be served."""
        return InvalidRequest(f"this {self.kind} cannot be enforced: {why}", param=self.param, code="invalid_grammar")

    def _parsed(self) -> object:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise self.refused(str(error)) from None

    def _check_choices(self, choices: object) -> None:
        if not isinstance(choices, list) or not choices or len(choices) > MAX_CHOICES:
            raise self.refused(f"it takes 1 to {MAX_CHOICES} strings")
        if not all(isinstance(choice, str) and choice for choice in choices):
            raise self.refused("every choice is a string that is not empty")

    def _check_pattern(self, pattern: str) -> None:
        if not pattern:
            raise self.refused("the pattern is empty")
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise self.refused(f"a pattern is longer than {MAX_PATTERN_CHARACTERS} characters")

    def _check_nodes(self, schema: object) -> None:
        """Bounds on depth, size and patterns, without recursion."""
        waiting: list[tuple[object, int]] = [(schema, 1)]
        nodes = 0
        while waiting:
            node, depth = waiting.pop()
            nodes += 1
            if depth > MAX_DEPTH:
                raise self.refused(f"it is nested more than {MAX_DEPTH} deep")
            if nodes > MAX_NODES:
                raise self.refused(f"it has more than {MAX_NODES} parts")
            if isinstance(node, dict):
                if isinstance(pattern := node.get("pattern"), str) and len(pattern) > MAX_PATTERN_CHARACTERS:
                    raise self.refused(f"a pattern is longer than {MAX_PATTERN_CHARACTERS} characters")
                waiting += ((child, depth + 1) for child in node.values())
            elif isinstance(node, list):
                waiting += ((child, depth + 1) for child in node)
