"""Who may ask, how much, from where: keys, limits, origins."""

import asyncio
import hmac

import anthropic
import pytest

from mlx_troupe.api import keys as keys_module
from mlx_troupe.api.app import create_app
from mlx_troupe.api.errors import ApiError
from mlx_troupe.api.keys import ApiKeys, load_keys
from mlx_troupe.api.limits import KeyLimits
from mlx_troupe.api.options import SettingsError
from mlx_troupe.api.page import PATHS as PAGE_PATHS
from mlx_troupe.runtime.events import Finished, TextDelta, Usage

from .fake_service import FakeService, Gate
from .serving import CHAT, HI, serving

ALICE, BOB = "alice-secret-key", "bob-secret-key"
KEYS = ApiKeys([("alice", ALICE), ("bob", BOB)])


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def every_route():
    """Method and path of every route there is."""
    app = create_app(FakeService())
    for route in app.router.routes():
        if route.method in ("GET", "POST", "DELETE"):
            yield route.method, route.resource.canonical.replace("{id}", "x")


OPEN = {"/livez", *PAGE_PATHS}
UNKNOWN = [("GET", "/nothing"), ("PUT", CHAT), ("POST", "/"), ("GET", "/page/"), ("GET", "/page/../metrics")]


@pytest.mark.parametrize(("method", "path"), [*every_route(), *UNKNOWN])
async def test_every_route_but_livez_and_the_page_is_closed_without_a_key(method, path):
    async with serving(keys=KEYS) as client:
        for headers in ({}, bearer("wrong-secret-key"), bearer(""), {"Authorization": ALICE}, {"X-Api-Key": "x"}):
            answer = await client.request(method, path, headers=headers)
            assert answer.status == (200 if method == "GET" and path in OPEN else 401), (method, path)
            if answer.status == 401:
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert not client.service.submitted


async def test_both_headers_open():
    async with serving(keys=KEYS) as client:
        for headers in (bearer(ALICE), bearer(BOB), {"X-Api-Key": BOB}, {"Authorization": f"bearer {ALICE}"}):
            assert (await client.post(CHAT, HI, headers=headers)).status == 200


async def test_clients_get_their_own_authentication_error():
    async with serving(keys=KEYS) as client:
        async with anthropic.AsyncAnthropic(base_url=client.url, api_key="x" * 10, max_retries=0) as asking:
            with pytest.raises(anthropic.AuthenticationError):
                await asking.messages.create(model="default", max_tokens=1, messages=HI["messages"])
        async with anthropic.AsyncAnthropic(base_url=client.url, api_key=ALICE, max_retries=0) as asking:
            await asking.messages.create(model="default", max_tokens=1, messages=HI["messages"])


async def test_names_and_never_keys_are_logged(caplog):
    caplog.set_level("DEBUG")
    async with serving(keys=KEYS, access_log=True) as client:
        await client.post(CHAT, HI, headers=bearer(ALICE))
        await client.post(CHAT, HI, headers=bearer("wrong-secret-key"))
    assert " alice" in caplog.text
    assert "secret-key" not in caplog.text
    assert "hi" not in [record.getMessage() for record in caplog.records]


def test_every_key_is_compared_whichever_matches(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(keys_module.hmac, "compare_digest", lambda a, b: compared.append(len(a)) or real(a, b))
    assert KEYS.name_of(ALICE) == "alice"
    assert KEYS.name_of("\ud800nobody") is None
    assert compared == [32] * 4


def test_keys_come_from_file_and_environment(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\nalice: alice-secret-key  # her key\n\nplain-secret-key\n")
    keys = load_keys(str(path), {"MLX_TROUPE_API_KEYS": "bob:bob-secret-key, other-secret-key"})
    names = [keys.name_of(key) for key in (ALICE, "plain-secret-key", BOB, "other-secret-key", "x")]
    assert names == ["alice", "key2", "bob", "key4", None]
    assert not load_keys(None, {})


@pytest.mark.parametrize("text", ["", "# nothing\n", "a:short\n", "a:has a blank in it\n", "a b:long-enough-key\n"])
def test_files_that_cannot_be_used(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(SettingsError):
        load_keys(str(path), {})


def test_a_name_stands_for_one_key(tmp_path):
    with pytest.raises(SettingsError, match="twice"):
        load_keys(None, {"MLX_TROUPE_API_KEYS": "a:long-enough-1,a:long-enough-2"})
    with pytest.raises(SettingsError):
        load_keys(str(tmp_path / "missing"), {})


async def test_one_key_cannot_take_all_places():
    gate = Gate()
    script = [TextDelta("a", (1,)), gate, Finished("stop", Usage())]
    async with serving(FakeService(lambda _: list(script)), keys=KEYS, max_concurrent_per_key=2) as client:
        running = [asyncio.ensure_future(client.post(CHAT, HI, headers=bearer(ALICE))) for _ in range(2)]
        await client.service.until(lambda: len(client.service.active) == 2)
        refused = await client.post(CHAT, HI, headers=bearer(ALICE))
        assert refused.status == 429
        assert refused.error["code"] == "concurrency_limit_exceeded"
        assert refused.headers["Retry-After"]
        other = asyncio.ensure_future(client.post(CHAT, HI, headers=bearer(BOB)))
        await client.service.until(lambda: len(client.service.active) == 3)
        gate.set()
        assert [(await answer).status for answer in (*running, other)] == [200, 200, 200]
        assert (await client.post(CHAT, HI, headers=bearer(ALICE))).status == 200


async def test_a_client_that_leaves_gives_its_place_back():
    script = [TextDelta("a", (1,)), Gate(), Finished("stop", Usage())]
    async with serving(FakeService(lambda _: list(script)), max_concurrent_per_key=1) as client:
        for _ in range(5):
            async with client.raw(CHAT, HI | {"stream": True}) as request:
                await request.until(b'"a"')
                request.abort()
            await client.service.until(lambda: not client.service.active)
            await asyncio.sleep(0)


def test_requests_a_minute():
    now = [0.0]
    limits = KeyLimits(None, 3, lambda: now[0])

    def ask(name):
        with limits.admitted(name):
            pass

    for _ in range(3):
        ask("a")
    with pytest.raises(ApiError) as caught:
        ask("a")
    assert caught.value.retry_after_s == 20
    ask("b")
    now[0] = 19.9
    with pytest.raises(ApiError):
        ask("a")
    now[0] = 40.1
    ask("a")
    ask("a")
    with pytest.raises(ApiError):
        ask("a")


async def test_no_page_may_call_unless_it_is_named():
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    async with serving() as client:
        answer = await client.request("OPTIONS", CHAT, headers=asks)
        assert answer.status == 405
        assert "Access-Control-Allow-Origin" not in answer.headers
        plain = await client.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert "Access-Control-Allow-Origin" not in plain.headers


async def test_a_named_origin_may_call():
    good = "https://chat.example"
    asks = {"Origin": good, "Access-Control-Request-Method": "POST"}
    async with serving(cors_origins=(good,), keys=KEYS) as client:
        answer = await client.request("OPTIONS", CHAT, headers=asks)
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == good
        used = await client.post(CHAT, HI | {"stream": True}, headers={"Origin": good} | bearer(ALICE))
        assert used.headers["Access-Control-Allow-Origin"] == good
        refused = await client.post(CHAT, HI, headers={"Origin": good})
        assert refused.status == 401
        assert refused.headers["Access-Control-Allow-Origin"] == good
        other = await client.request("OPTIONS", CHAT, headers=asks | {"Origin": "https://evil.example"})
        assert other.status == 401
