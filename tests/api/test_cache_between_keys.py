"""Whether a prefix was cached for one key shows to no other: not in `cached_tokens`, not in time. On real sockets."""

import random
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest

from mlx_troupe.api.keys import ApiKeys
from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime import Runtime
from tests.models.tiny import build_tiny

from .serving import HI, serving

KEYS = ApiKeys([("alice", "alice-secret-key"), ("bob", "bob-secret-key")])
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in ("alice-secret-key", "bob-secret-key"))
PAGE = 16
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("llama", tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def asking(folder, keys=KEYS, **settings):
    """A function that asks a real server: (headers, path, body) to the JSON of its answer."""
    async with (
        Runtime(model=str(folder), page_tokens=PAGE) as runtime,
        listening(runtime, ServerSettings(port=0, access_log=False, **settings), keys) as url,
        aiohttp.ClientSession() as session,
    ):

        async def ask(headers, body, path="/v1/completions"):
            async with session.post(url + path, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        yield ask


def tokens(count, seed):
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(count)]


def completion(prompt, **fields):
    return {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


PROTOCOLS = {
    "/v1/completions": (completion(TEXT), cached),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}, cached),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2},
        lambda answer: answer["usage"]["cache_read_input_tokens"],
    ),
    "/v1/responses": (
        {"input": TEXT, "max_output_tokens": 2},
        lambda answer: answer["usage"]["input_tokens_details"]["cached_tokens"],
    ),
}


@pytest.mark.parametrize("path", PROTOCOLS)
async def test_a_key_finds_its_own_prefixes_and_no_others(folder, path):
    body, found = PROTOCOLS[path]
    async with asking(folder) as ask:
        assert [found(await ask(ALICE, body, path)) > 0 for _ in range(2)] == [False, True]
        assert [found(await ask(BOB, body, path)) > 0 for _ in range(2)] == [False, True]


async def test_no_salt_opens_another_keys_prefixes(folder):
    prompt = tokens(60, "salted")
    owner = KEYS.owner("alice")
    async with asking(folder) as ask:
        for salt in ("", "shared", f"{owner}:shared", owner):
            await ask(ALICE, completion(prompt, cache_salt=salt))
            assert cached(await ask(ALICE, completion(prompt, cache_salt=salt))) > 0
        for salt in ("", "shared", f"{owner}:shared", f"{owner}:", owner, "alice"):
            assert cached(await ask(BOB, completion(prompt, cache_salt=salt))) == 0


async def test_keys_may_be_let_to_share(folder):
    prompt = tokens(60, "shared")
    async with asking(folder, share_cache_across_keys=True) as ask:
        await ask(ALICE, completion(prompt))
        await ask(ALICE, completion(prompt, cache_salt="mine"))
        assert cached(await ask(BOB, completion(prompt))) > 0
        assert cached(await ask(BOB, completion(prompt, cache_salt="mine"))) > 0
        assert cached(await ask(BOB, completion(prompt, cache_salt="other"))) == 0


async def test_one_key_shares_with_what_was_computed_at_start(folder, tmp_path):
    """Prefixes of the warm-up file belong to no key."""
    seen = []
    for keys in (ApiKeys([("alice", "alice-secret-key")]), KEYS):
        async with serving(keys=keys) as client:
            await client.post("/v1/chat/completions", HI | {"cache_salt": "mine"}, headers=ALICE)
            seen.append(client.service.submitted[0].cache_salt)
    assert seen[0] == "mine"
    assert seen[1] == KEYS.owner("alice") + ":mine"


async def test_the_time_of_a_hit_shows_to_no_other_key(folder):
    """Prompts that another key has sent take as long as new ones; one's own take less."""
    times = {"new": [], "alice's": [], "own": []}
    async with asking(folder) as ask:
        for turn in range(6):
            known, new = (completion(tokens(1500, f"{turn} {kind}"), max_tokens=1) for kind in ("known", "new"))
            await ask(ALICE, known)
            for kind, body in (("new", new), ("alice's", known), ("own", known)):
                began = time.perf_counter()
                await ask(BOB, body)
                times[kind].append(time.perf_counter() - began)
    new, others, own = (min(times[kind]) for kind in ("new", "alice's", "own"))
    assert 3 * own < min(new, others), times
    assert others > 0.5 * new, times


def test_an_owner_is_a_name_and_its_key():
    """A place in a file, or a name, may pass to another key; what it had does not."""
    keys = [ApiKeys([("key1", "first-secret-key")]), ApiKeys([("key1", "other-secret-key")]), KEYS]
    owners = [
        known.owner(name) for known in keys for name in ("key1", "alice", "bob", "anonymous") if known.owner(name)
    ]
    assert len(set(owners)) == len(owners) == 4
