"""Two and three tiny models behind one server, over real sockets, by a user who means no good."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime.config import RuntimeConfig
from mlx_troupe.runtime.pool.pool import ModelPool
from mlx_troupe.runtime.pool.settings import PooledModel, PoolSettings
from tests.models.tiny import build_tiny

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAMES = {"one": "llama", "two": "gemma3_text", "three": "qwen3"}
PROMPT = list(range(20, 60))
SECONDS = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for name, architecture in NAMES.items():
        found[name] = build_tiny(architecture, tmp_path_factory.mktemp("models") / name)
    return found


@pytest.fixture(scope="module")
def alone(folders):
    """Greedy tokens of mlx_lm alone."""
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    def get(name: str, prompt: list[int], count: int) -> list[int]:
        model = load(str(folders[name]))[0]
        return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]

    return get


def pooled(folder: Path, name: str, **fields: Any) -> PooledModel:
    config = RuntimeConfig(model=str(folder), served_name=name, max_rows=16, prefix_cache_bytes=1 << 20)
    return PooledModel(name=name, config=config, **fields)


class User:
    """Asks one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, pool: ModelPool) -> None:
        self.url, self.session, self.pool = url, session, pool

    async def post(self, model: str, *, stream: bool = False, tokens: int = 8, **fields: Any) -> Any:
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": stream}
        body |= fields
        return await self.session.post(self.url + "/v1/completions", json=body)

    async def text(self, model: str, **fields: Any) -> tuple[int, Any]:
        async with await self.post(model, **fields) as answer:
            return answer.status, await answer.json()

    async def stream(self, model: str, tokens: int, stamps: list[float] | None = None) -> str:
        """A stream's text; `stamps` gets the time of each piece."""
        pieces = []
        async with await self.post(model, stream=True, tokens=tokens) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                if stamps is not None:
                    stamps.append(time.perf_counter())
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                pieces += [choice["text"] for choice in chunk["choices"]]
        return "".join(pieces)

    async def json(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            return await answer.json()

    async def state(self, name: str) -> str:
        return (await self.json(f"/v1/models/{name}"))["state"]

    async def until(self, name: str, *states: str) -> None:
        async with asyncio.timeout(SECONDS):
            while (await self.state(name)) not in states:  # noqa: ASYNC110 as a user would, who has no event
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(*models: PooledModel, **settings: Any) -> AsyncIterator[User]:
    before = asyncio.all_tasks()
    pool = ModelPool(models, PoolSettings(**settings))
    async with (
        asyncio.timeout(4 * SECONDS),
        pool,
        listening(pool, ServerSettings(port=0, access_log=False)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield User(url, session, pool)
    assert all(entry.state in ("idle", "failed") and not entry.users for entry in pool.entries())
    assert not (asyncio.all_tasks() - before - {asyncio.current_task()})


async def test_streams_of_two_models_while_the_third_loads(folders):
    """Each text is what its model says when it is alone in the process, and no model stops for another's load."""
    texts = {}
    for name in NAMES:
        async with serving(pooled(folders[name], name)) as user:
            texts[name] = await user.stream(name, 60)
    assert len(set(texts.values())) == 3
    async with serving(*(pooled(folders[name], name) for name in NAMES)) as user:
        await user.stream("two", 1)
        assert await user.state("three") == "idle"
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(user.stream(name, 60)) for name in [*NAMES] * 4]
        assert [task.result() for task in tasks] == [texts[name] for name in [*NAMES] * 4]
        status = await user.json("/v1/troupe/status")
        assert [model["entry"]["state"] for model in status["models"]] == ["ready"] * 3
        assert status["loads"] == 3
        assert status["statistics"]["completion_tokens"] == 12 * 60 + 1
        metrics = await (await user.session.get(user.url + "/metrics")).text()
        for name in NAMES:
            assert f'mlx_troupe_request_success_total{{finished_reason="length",model_name="{name}"}}' in metrics
            assert f'mlx_troupe_model_load_seconds{{model_name="{name}"}}' in metrics
            assert f'mlx_troupe_actor_messages_total{{actor="decode",model_name="{name}"}}' in metrics


async def test_two_engines_at_once_say_what_mlx_lm_says(folders, alone):
    async with serving(*(pooled(folders[name], name, pin=True) for name in ("one", "two"))) as user:
        pool = user.pool
        from mlx_troupe.runtime.generation import Generation
        from mlx_troupe.runtime.sampling_params import SamplingParams

        async def tokens(name: str, prompt: list[int]) -> list[int]:
            greedy = SamplingParams(temperature=0)
            async with pool.lease(name) as service:
                done = await service.complete(
                    Generation(tokens=tuple(prompt), sampling=greedy, max_tokens=40, ignore_eos=True)
                )
            return list(done.choices[0].tokens)

        asked = [(name, list(range(10 + place, 30 + 80 * place))) for place in range(6) for name in ("one", "two")]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(tokens(name, prompt)) for name, prompt in asked]
        for (name, prompt), task in zip(asked, tasks, strict=True):
            assert task.result() == alone(name, prompt, 40)


async def test_broken_models_never_trouble_the_others(folders, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    torn = tmp_path / "torn"
    shutil.copytree(folders["two"], torn)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:5000])
    models = [
        pooled(folders["one"], "one"),
        pooled(empty, "empty"),
        pooled(torn, "torn"),
        pooled(tmp_path / "no", "no"),
    ]
    async with serving(*models) as user:
        text = await user.stream("one", 30)
        for name in ("empty", "torn", "no"):
            status, answer = await user.text(name)
            assert status == 503
            assert name in answer["error"]["message"]
            assert str(tmp_path) not in json.dumps(answer)
            async with await user.post(name, stream=True) as again:
                assert again.status == 503
                assert 1 <= int(again.headers["Retry-After"]) <= 5
            assert await user.state(name) == "failed"
            assert str(tmp_path) not in json.dumps(await user.json(f"/v1/models/{name}"))
        assert await user.stream("one", 30) == text
        ready = await user.json("/readyz")
        assert ready["status"] == "ready"
        assert ready["models"]["torn"]["state"] == "failed"


async def test_a_repaired_model_is_served(folders, tmp_path):
    folder = tmp_path / "late"
    async with serving(pooled(folders["one"], "one"), pooled(folder, "late")) as user:
        assert (await user.text("late"))[0] == 503
        shutil.copytree(folders["two"], folder)
        user.pool._slots[1].retry_at_s = 0.0  # its time has come
        assert (await user.text("late"))[0] == 200


async def test_cancel_and_disconnect_while_a_model_loads(folders):
    async with serving(*(pooled(folders[name], name) for name in ("one", "two"))) as user:
        await user.until("one", "ready")
        headers = {"X-Request-Id": "mine"}
        body = {"model": "two", "prompt": "x", "stream": True}
        waiting = asyncio.ensure_future(user.session.post(user.url + "/v1/completions", json=body, headers=headers))
        leaving = asyncio.ensure_future(user.post("two", stream=True))
        await user.until("two", "loading")
        status = await (await user.session.delete(user.url + "/v1/requests/mine")).json()
        assert status["cancelled"]
        async with await waiting as answer:
            assert answer.status == 499
        leaving.cancel()
        await user.until("two", "ready")
        async with asyncio.timeout(SECONDS):
            while user.pool.entry("two").users:  # noqa: ASYNC110 the server has to notice
                await asyncio.sleep(0.01)
        assert (await user.text("two"))[0] == 200


async def test_requests_that_race_unloads_are_never_lost(folders):
    """Two models, room for one, and a time to live so short that ticks unload them as well."""
    async with serving(
        *(pooled(folders[name], name) for name in ("one", "two")), max_loaded_models=1, model_ttl_s=0.01
    ) as user:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(user.text(name)) for name in ("one", "two", "one", "two")]
        first = [task.result() for task in tasks]
        assert [status for status, _ in first] == [200] * 4
        for _ in range(3):
            user.pool.tick()
            status, answer = await user.text("one")
            assert (status, answer["choices"][0]["text"]) == (200, first[0][1]["choices"][0]["text"])
        assert (await user.pool.status()).unloads >= 2


async def test_a_busy_model_is_never_unloaded(folders):
    models = [pooled(folders["one"], "one"), pooled(folders["two"], "two")]
    async with serving(*models, max_loaded_models=1, model_wait_s=0.3) as user:
        await user.until("one", "ready")
        async with user.pool.lease("one") as service:  # as a stream does, which might be over too soon
            async with await user.post("two") as refused:
                assert refused.status == 503
                assert "Retry-After" in refused.headers
            assert await user.state("one") == "ready"
            assert service.readiness().ready
        while (await user.text("two"))[0] == 503:  # noqa: ASYNC110 as told: the load may take longer than a wait
            await asyncio.sleep(0.05)
        assert await user.state("two") == "ready"
        assert await user.state("one") == "idle"


async def test_models_make_room_for_each_other_in_memory(folders, monkeypatch):
    """Each model is taken for one as large as all that may be used: two are never loaded at once."""
    from mlx_troupe.runtime.models import weights

    monkeypatch.setattr(weights, "resident_bytes", lambda spec: 1 << 60)
    async with serving(*(pooled(folders[name], name) for name in ("one", "two"))) as user:
        assert (await user.text("one"))[0] == 200
        for name in ("two", "one", "two"):
            status, _ = await user.text(name)
            assert status == 200
            assert [entry.name for entry in user.pool.entries() if entry.state == "ready"] == [name]
        async with await user.post("one", stream=True, tokens=300) as long:
            waiting = asyncio.ensure_future(user.text("two"))
            assert b"[DONE]" in await long.content.read()
        assert (await waiting)[0] == 200
