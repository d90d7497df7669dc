"""Hundreds of schemas with random output: what finishes validates, and nearly all finish."""

import asyncio
import json
import random

import jsonschema
import pytest

from mlx_troupe.runtime import Generation, Runtime, SamplingParams
from mlx_troupe.runtime.grammar import Grammar
from tests.models.tiny import build_tiny

FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def leaf(rng: random.Random) -> dict:
    """A schema of one value: bounded, so that random output ends."""
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randrange(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {
                "type": "string",
                "pattern": rng.choice(["^[a-f0-9]{4}$", "^(yes|no)$", "^[A-Z][a-z]{1,5}$", r"^\d{3}-\d{2}$"]),
            },
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 1000)},
            {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
            {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["a", 1, None, True, "ü\n"]},
            {"const": rng.choice([1, "x", [1, {"a": None}], {"b": []}])},
            {"type": ["boolean", "null"]},
        ]
    )


def schema(rng: random.Random, depth: int = 0) -> dict:
    """A random schema."""
    kind = rng.choice(["leaf", "object", "array", "anyOf", "oneOf", "ref", "tuple"]) if depth < 3 else "leaf"
    match kind:
        case "object":
            names = rng.sample(["a", "b", "ç d", 'e"f', "g"], rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randrange(len(names) + 1)),
                "additionalProperties": False,
            }
        case "array":
            low = rng.randrange(3)
            return {
                "type": "array",
                "items": schema(rng, depth + 1),
                "minItems": low,
                "maxItems": low + rng.randrange(3),
            }
        case "tuple":
            items = [schema(rng, depth + 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [schema(rng, depth + 1) for _ in range(2)]}
        case "oneOf":
            return {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 0, "maximum": 99}]}
        case "ref":
            return {"$ref": f"#/$defs/{rng.choice('xy')}"}
        case _:
            return leaf(rng)


def whole(seed: int) -> dict:
    rng = random.Random(seed)
    return schema(rng) | {"$defs": {"x": leaf(rng), "y": {"type": "array", "items": leaf(rng), "maxItems": 2}}}


@pytest.mark.heavy
async def test_500_schemas(tmp_path, record_property):
    ends = {"stop": 0, "length": 0}
    places = asyncio.Semaphore(64)
    async with Runtime(model=str(build_tiny("llama", tmp_path)), max_rows=32, max_queue=1000) as runtime:

        async def one(seed: int) -> None:
            given = whole(seed)
            grammar = Grammar("json_schema", json.dumps(given))
            sampling = SamplingParams(temperature=1.0, seed=seed)
            generation = Generation(prompt=f"{seed}", grammar=grammar, sampling=sampling, max_tokens=1500)
            async with places:
                answer = await runtime.complete(generation)
            ends[answer.choices[0].finish_reason] += 1
            if answer.choices[0].finish_reason == "stop":
                jsonschema.Draft202012Validator(given).validate(json.loads(answer.text))

        await asyncio.gather(*(one(seed) for seed in range(500)))
    print(ends)
    record_property("ends", ends)
    assert sum(ends.values()) == 500
    assert ends["stop"] >= 475, ends
