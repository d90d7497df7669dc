"""What a request constrains its output to: `response_format`, and what other servers' clients send for the same.

Pure; raises ApiError naming the field. The grammar itself is compiled by the runtime.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..runtime.grammar.spec import Grammar, Kind
from .errors import invalid
from .wire.decode import unsupported

if TYPE_CHECKING:
    from .wire.fields import ConstraintFields, ResponseFormat

_NEW_NAMES = ("json", "json_object", "regex", "choice", "grammar")


def grammar_of(request: ConstraintFields) -> Grammar | None:
    """The one constraint of a request, None when there is none."""
    found = [grammar for grammar in _all(request) if grammar is not None]
    if len(found) > 1:
        raise invalid(f"{found[0].param} and {found[1].param} both constrain the output", param=found[1].param)
    return found[0] if found else None


def _all(request: ConstraintFields) -> list[Grammar | None]:
    return [
        _response_format(request.response_format),
        *_structured(request.structured_outputs),
        _schema(request.guided_json, "guided_json"),
        _schema(request.json_schema, "json_schema"),
        _text("regex", request.guided_regex, "guided_regex"),
        _choice(request.guided_choice, "guided_choice"),
        _grammar(request.guided_grammar, "guided_grammar"),
        _grammar(request.grammar, "grammar"),
    ]


def _response_format(given: ResponseFormat | None) -> Grammar | None:
    if given is None:
        return None
    match given.type:
        case "text":
            return None
        case "json_object":
            return _schema(given.schema, "response_format.schema") or Grammar("json_object")
        case "json_schema":
            inner = given.json_schema
            if inner is None or inner.schema is None:
                name = "response_format.json_schema.schema"
                raise invalid(f"{name} is required", param=name, code="missing_parameter")
            return _schema(inner.schema, "response_format")
        case "regex" | "grammar" | "lark_grammar" | "gbnf" as kind:
            text = given.regex if kind == "regex" else given.grammar
            if text is None:
                raise invalid(f"response_format of type {kind} lacks its text", param="response_format")
            return _text("regex", text, "response_format") if kind == "regex" else _grammar(text, "response_format")
        case _:
            raise unsupported("response_format.type", "text, json_object, json_schema, regex and grammar are")


def _structured(given: dict[str, Any] | None) -> list[Grammar | None]:
    asked = {name: value for name, value in (given or {}).items() if value not in (None, False)}
    for name in asked:
        if name not in _NEW_NAMES:
            raise unsupported(f"structured_outputs.{name[:64]}", f"{', '.join(_NEW_NAMES)} are")
    param = "structured_outputs"
    return [
        _schema(asked.get("json"), f"{param}.json"),
        Grammar("json_object", "", f"{param}.json_object") if asked.get("json_object") else None,
        _text("regex", asked.get("regex"), f"{param}.regex"),
        _choice(asked.get("choice"), f"{param}.choice"),
        _grammar(asked.get("grammar"), f"{param}.grammar"),
    ]


def _schema(given: object, param: str) -> Grammar | None:
    if given is None:
        return None
    if isinstance(given, str):
        return Grammar("json_schema", given, param)
    if not isinstance(given, dict | bool):
        raise invalid(f"{param} must be a JSON schema", param=param, code="invalid_type")
    return Grammar("json_schema", json.dumps(given), param)


def _choice(given: object, param: str) -> Grammar | None:
    if given is None:
        return None
    if not isinstance(given, list):
        raise invalid(f"{param} must be a list of texts", param=param, code="invalid_type")
    return Grammar("choice", json.dumps(given), param)


def _text(kind: Kind, given: object, param: str) -> Grammar | None:
    if given is None:
        return None
    if not isinstance(given, str):
        raise invalid(f"{param} must be a text", param=param, code="invalid_type")
    return Grammar(kind, given, param)


def _grammar(given: object, param: str) -> Grammar | None:
    """A Lark grammar, or llama.cpp's GBNF, which writes `::=`."""
    is_gbnf = isinstance(given, str) and "::=" in given
    return _text("gbnf" if is_gbnf else "lark", given, param)
