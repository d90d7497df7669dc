"""Requests reach the model they name, through a directory of several; names are looked up and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime.directory import (
    DEFAULT_MODEL_NAMES,
    DirectoryStatus,
    ModelEntry,
    ModelStatus,
    SingleModel,
    directory_of,
)
from mlx_troupe.runtime.errors import NotReady, RequestCancelled, UnknownModel
from mlx_troupe.runtime.service import Readiness, Service

from .fake_service import FakeService
from .serving import HI, Client

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", HI),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/messages", HI | {"max_tokens": 5}),
    ("/v1/messages/count_tokens", HI),
    ("/v1/responses", {"input": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1]}),
]


class FakeDirectory:
    """Two fake services, "one" (also "uno") and "two"; a lease of a model whose gate is shut waits for it.

    Attributes:
        leased: names of the models leased, in order.
        held: leases that are out.
        came, went: names of models that a wait for began and ended.
    """

    def __init__(self) -> None:
        self.services = {"one": FakeService(), "two": FakeService()}
        self.gates: dict[str, asyncio.Event] = {}
        self.failures: dict[str, NotReady] = {}
        self.leased: list[str] = []
        self.held = 0
        self.came: asyncio.Queue[str] = asyncio.Queue()
        self.went: asyncio.Queue[str] = asyncio.Queue()
        self.waiting: dict[tuple[str, ...], asyncio.Future[None]] = {}
        self.state = Readiness(True)

    @property
    def active(self) -> dict[str, Any]:
        return self.services["one"].active | self.services["two"].active

    def entries(self) -> list[ModelEntry]:
        info = self.services["one"].model
        one = ModelEntry(name="one", aliases=("uno",), info=info)
        return [one, ModelEntry(name="two", state="loading", detail="weights", progress=0.25)]

    def entry(self, name: str) -> ModelEntry:
        known = {"one": 0, "uno": 0, "two": 1} | dict.fromkeys(DEFAULT_MODEL_NAMES, 0)
        if name not in known:
            raise UnknownModel(name, ["one", "two"])
        return self.entries()[known[name]]

    @asynccontextmanager
    async def lease(self, name: str, request_ids: Sequence[str] = ()) -> AsyncIterator[Service]:
        found = self.entry(name).name
        if found in self.failures:
            raise self.failures[found]
        if found in self.gates:
            wait = self.waiting[tuple(request_ids)] = asyncio.ensure_future(self.gates[found].wait())
            self.came.put_nowait(found)
            try:
                await wait
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():
                    raise
                raise RequestCancelled("cancelled while its model was loaded") from None
            finally:
                wait.cancel()
                del self.waiting[tuple(request_ids)]
                self.went.put_nowait(found)
        self.leased.append(found)
        self.held += 1
        try:
            yield self.services[found]
        finally:
            self.held -= 1

    def readiness(self) -> Readiness:
        return self.state

    def accepts(self) -> Readiness:
        return self.state

    async def status(self) -> DirectoryStatus:
        models = [ModelStatus(entry=entry, status=None) for entry in self.entries()]
        whole = await self.services["one"].status()
        return DirectoryStatus(
            readiness=self.state, models=tuple(models), model="one", statistics=whole.statistics, memory=None
        )

    async def metrics(self) -> bytes:
        return b""

    def cancel(self, request_id: str) -> None:
        for ids, wait in self.waiting.items():
            if request_id in ids:
                wait.cancel()
        for service in self.services.values():
            service.cancel(request_id)

    async def drain(self, timeout_s: float) -> None:
        self.state = Readiness(False, "draining")


@asynccontextmanager
async def serving(directory: FakeDirectory) -> AsyncIterator[Client]:
    async with (
        listening(directory, ServerSettings(port=0, access_log=False)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Client(url, session, directory.services["one"])
    assert directory.held == 0
    assert not directory.active


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
async def test_every_route_serves_the_model_that_is_named(path, body):
    directory = FakeDirectory()
    async with serving(directory) as client:
        for name, wanted in [("two", "two"), ("one", "one"), ("uno", "one"), ("", "one"), ("default", "one")]:
            answer = await client.post(path, body | {"model": name})
            assert answer.status == 200, answer.body
            assert directory.leased.pop() == wanted
        for name in ("three", "ONE", "../one", "/etc", "one/", "one\0"):
            answer = await client.post(path, body | {"model": name})
            assert answer.status == 404, answer.body
            if not path.startswith("/v1/messages"):
                assert answer.error["code"] == "model_not_found"
                assert answer.error["param"] == "model"
        assert directory.leased == []


async def test_models_and_their_state_are_listed():
    async with serving(FakeDirectory()) as client:
        one, two = (await client.get("/v1/models")).json["data"]
        assert one == {
            "id": "one",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "mlx-troupe",
            "context_length": 4096,
            "state": "ready",
            "aliases": ["uno"],
        }
        assert (two["id"], two["state"], two["detail"], two["progress"]) == ("two", "loading", "weights", 0.25)
        assert "context_length" not in two
        assert (await client.get("/v1/models/two")).json == two
        assert (await client.get("/v1/models/three")).status == 404
        status = (await client.get("/v1/troupe/status")).json
        assert [model["entry"]["name"] for model in status["models"]] == ["one", "two"]


async def test_a_broken_model_answers_its_own_requests_only():
    directory = FakeDirectory()
    directory.failures["two"] = NotReady("'two' could not be loaded: no config.json", retry_after_s=7)
    async with serving(directory) as client:
        answer = await client.chat(model="two")
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "7"
        assert "no config.json" in answer.error["message"]
        assert (await client.chat(model="one")).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_for_a_model_ends_when_it_is_cancelled(stream):
    directory = FakeDirectory()
    directory.gates["two"] = asyncio.Event()
    async with serving(directory) as client:
        headers = {"X-Request-Id": "mine"}
        waits = client.post("/v1/chat/completions", HI | {"model": "two", "stream": stream}, headers=headers)
        waiting = asyncio.ensure_future(waits)
        await directory.came.get()
        assert (await client.request("DELETE", "/v1/requests/mine")).status == 200
        assert (await waiting).status == 499
        assert not directory.waiting


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_a_wait_for_a_model_is_part_of_the_requests_time(path):
    directory = FakeDirectory()
    directory.gates["two"] = asyncio.Event()
    async with serving(directory) as client:
        answer = await client.post(path, dict(ROUTES)[path] | {"model": "two", "timeout": 0.05})
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        assert not directory.waiting


async def test_a_client_that_leaves_ends_its_wait_for_a_model():
    directory = FakeDirectory()
    directory.gates["two"] = asyncio.Event()
    async with serving(directory) as client:
        async with client.raw("/v1/chat/completions", HI | {"model": "two", "stream": True}) as request:
            await directory.came.get()
            request.abort()
        await directory.went.get()
        assert await client.metric('mlx_troupe_http_disconnects_total{stage="loading"}') == 1


async def test_a_single_service_is_a_directory_too():
    service = FakeService()
    directory = directory_of(service)
    assert isinstance(directory, SingleModel)
    assert directory_of(directory) is directory
    async with directory.lease("default") as found:
        assert found is service
    service.state = Readiness(False, "stalled")
    assert directory.accepts().ready
    assert not directory.readiness().ready
    service.state = Readiness(False, "draining", "soon")
    assert directory.accepts() == service.state
