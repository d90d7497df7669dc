"""The document is true to what is served."""

import json

import jsonschema
import pytest

from mlx_troupe.api.app import create_app
from mlx_troupe.api.keys import ApiKeys
from mlx_troupe.api.openapi import document

from .fake_service import FakeService
from .serving import CHAT, COMPLETIONS, HI, serving


@pytest.fixture(scope="module")
def described():
    return document(create_app(FakeService()), with_keys=False)


def validator(described, reference):
    schema = reference | {"components": described["components"]}
    return jsonschema.Draft202012Validator(schema)


def test_every_route_is_described_and_nothing_else(described):
    served = {
        (route.method.lower(), route.resource.canonical.replace("{id:.+}", "{id}"))
        for route in create_app(FakeService()).router.routes()
        if route.method != "HEAD"
    }
    assert {(method, path) for path, methods in described["paths"].items() for method in methods} == served


def test_every_part_has_a_summary_and_references_lead_somewhere(described):
    for methods in described["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
    names = set(described["components"]["schemas"])
    text = json.dumps(described)
    for piece in text.split('"$ref": "#/components/schemas/')[1:]:
        assert piece.partition('"')[0] in names


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI | {"logprobs": True, "top_logprobs": 2, "stop": ["x"], "response_format": {"type": "json_object"}}),
        (COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 1}),
        ("/v1/messages", HI | {"max_tokens": 5}),
        ("/v1/messages/count_tokens", HI),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_requests_and_answers_are_as_described(described, path, body):
    operation = described["paths"][path]["post"]
    takes = operation["requestBody"]["content"]["application/json"]["schema"]
    validator(described, takes).validate(body)
    gives = operation["responses"]["200"]["content"]["application/json"]["schema"]
    async with serving() as client:
        answer = await client.post(path, body)
        assert answer.status == 200
        validator(described, gives).validate(answer.json)
        wrong = await client.post(path, {"model": 5})
        assert wrong.status == 400
        assert not validator(described, takes).is_valid({"model": 5})


async def test_the_document_and_the_page_are_served():
    async with serving(keys=ApiKeys([("a", "long-enough")])) as client:
        headers = {"X-Api-Key": "long-enough"}
        found = (await client.get("/openapi.json", headers=headers)).json
        assert found["openapi"] == "3.1.0"
        assert found["security"] == [{"key": []}]
        page = await client.get("/docs", headers=headers)
        assert page.headers["Content-Type"].startswith("text/html")
        assert "script" not in page.body.decode()
        assert "/v1/chat/completions" in page.body.decode()
