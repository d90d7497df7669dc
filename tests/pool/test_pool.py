"""When models are loaded, kept and unloaded, and what requests get meanwhile. Fake services, a clock of the test's."""

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from mlx_troupe.runtime.clock import ManualClock
from mlx_troupe.runtime.directory import ModelDirectory
from mlx_troupe.runtime.errors import NotReady, RequestCancelled, TroupeError, UnknownModel
from mlx_troupe.runtime.models.progress import Progress
from mlx_troupe.runtime.pool.pool import ModelPool
from mlx_troupe.runtime.pool.settings import look_up, model_name
from mlx_troupe.runtime.service import Readiness

from .pools import Opened, models, pool_of


def states(pool):
    return {entry.name: entry.state for entry in pool.entries()}


async def held(pool, name, release, got, ids=()):
    """Hold a lease until told; `got` hears of it, or of the error."""
    try:
        async with pool.lease(name, ids) as service:
            got.append(service)
            await release.wait()
    except TroupeError as error:
        got.append(error)


async def test_the_first_is_loaded_at_the_start_and_others_when_named():
    opened = Opened("a", "b")
    async with pool_of(opened, models("a", "b")) as pool:
        assert isinstance(pool, ModelDirectory)
        await wait_all_tasks_blocked()
        assert states(pool) == {"a": "ready", "b": "idle"}
        async with pool.lease("b") as service:
            assert service is opened["b"]
        async with pool.lease("") as service:
            assert service is opened["a"]
        assert states(pool) == {"a": "ready", "b": "ready"}


async def test_pinned_ones_are_loaded_instead():
    opened = Opened("a", "b")
    async with pool_of(opened, [*models("a"), *models("b", pin=True)]) as pool:
        await wait_all_tasks_blocked()
        assert states(pool) == {"a": "idle", "b": "ready"}


async def test_one_load_serves_all_who_wait_and_others_go_on():
    opened, got, release = Opened("a"), [], anyio.Event()
    async with pool_of(opened, models("a", "b")) as pool, anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(held, pool, "b", release, got)
        await wait_all_tasks_blocked()
        assert states(pool)["b"] == "loading"
        assert opened.count("b") == 1
        async with pool.lease("a") as service:
            assert service is opened["a"]
        assert got == []
        opened["b"].may_load.set()
        await wait_all_tasks_blocked()
        assert got == [opened["b"]] * 5
        release.set()


async def test_progress_is_told():
    opened = Opened()
    async with pool_of(opened, models("a")) as pool:
        await wait_all_tasks_blocked()
        opened.reports["a"](Progress("download a", 25, 100))
        (entry,) = pool.entries()
        assert (entry.state, entry.detail, entry.progress) == ("loading", "download a: 25%", 0.25)
        assert pool.readiness() == Readiness(False, "loading", "a: download a: 25%")
        assert pool.accepts().ready
        opened["a"].may_load.set()
        await wait_all_tasks_blocked()
        assert pool.readiness() == Readiness(True)


async def test_names_are_looked_up_and_paths_never_are():
    opened = Opened("a", "b")
    async with pool_of(opened, [*models("a"), *models("b", aliases=("bee",))]) as pool:
        for name in ("b", "bee", "/m/b"):
            assert pool.entry(name).name == "b"
        for name in ("", "default", "a"):
            assert pool.entry(name).name == "a"
        for name in ("c", "/m/c", "./b", "B", "/m"):
            with pytest.raises(UnknownModel, match="is not served here"):
                async with pool.lease(name):
                    pass


def test_two_models_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two models are called 'a'"):
        look_up(models("a", "a"))
    with pytest.raises(ValueError, match="two models are called 'a'"):
        look_up([*models("a"), *models("b", aliases=("a",))])
    with pytest.raises(ValueError, match="names the first model"):
        look_up(models("default"))
    with pytest.raises(ValueError, match="needs a model"):
        ModelPool([])


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("/models/Qwen3-4B/", "Qwen3-4B"),
        ("./x", "x"),
        ("~/x/y", "y"),
        ("org/name", "org/name"),
        ("some/where/deep", "deep"),
        ("/m/file.Q4_K.gguf", "file.Q4_K"),
        ("demo", "demo"),
    ],
)
def test_a_model_is_called_by_its_last_part(word, name):
    assert model_name(word) == name


async def test_a_model_is_unloaded_when_its_time_is_over_and_not_before():
    opened, clock = Opened("a", "b"), ManualClock()
    named = [*models("a", pin=True), *models("b"), *models("c", ttl_s=100.0)]
    opened.at_once.add("c")
    async with pool_of(opened, named, clock, model_ttl_s=10.0) as pool:
        async with pool.lease("b"), pool.lease("c"):
            clock.advance(1000)
            pool.tick()
            assert states(pool) == {"a": "ready", "b": "ready", "c": "ready"}
        clock.advance(9.9)
        pool.tick()
        assert states(pool)["b"] == "ready"
        clock.advance(0.2)
        pool.tick()
        await wait_all_tasks_blocked()
        assert states(pool) == {"a": "ready", "b": "idle", "c": "ready"}
        assert opened["b"].exited
        clock.advance(100)
        pool.tick()
        await wait_all_tasks_blocked()
        assert states(pool) == {"a": "ready", "b": "idle", "c": "idle"}
        async with pool.lease("b") as service:
            assert service is opened["b"]
        assert opened.count("b") == 2
        assert (await pool.status()).unloads == 2


async def test_a_request_that_meets_an_unload_waits_for_the_next_load():
    opened, clock, got, release = Opened("a"), ManualClock(), [], anyio.Event()
    async with pool_of(opened, models("a"), clock, model_ttl_s=1.0) as pool, anyio.create_task_group() as group:
        async with pool.lease("a") as first:
            pass
        clock.advance(2)
        pool.tick()
        assert states(pool) == {"a": "unloading"}
        group.start_soon(held, pool, "a", release, got)
        await checkpoint()
        await wait_all_tasks_blocked()
        (second,) = got
        assert second is not first
        assert second is opened["a"]
        assert first.exited
        assert not second.exited
        release.set()


async def test_the_one_used_longest_ago_makes_place():
    opened, clock, release = Opened("a", "b", "c", "d"), ManualClock(), anyio.Event()
    async with pool_of(opened, models("a", "b", "c", "d"), clock, max_loaded_models=2) as pool:
        for name in ("a", "b", "a"):
            clock.advance(1)
            async with pool.lease(name):
                pass
        async with pool.lease("c"):
            assert states(pool) == {"a": "ready", "b": "idle", "c": "ready", "d": "idle"}
            got = []
            async with anyio.create_task_group() as group, pool.lease("a"):
                group.start_soon(held, pool, "d", release, got)
                await wait_all_tasks_blocked()
                assert states(pool)["d"] == "loading"  # both are in use: it waits
                assert not opened["a"].exited
                assert not opened["c"].exited
                assert got == []
                group.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert states(pool)["d"] == "idle"  # nobody waits for it any more
        async with pool.lease("d"):
            assert list(states(pool).values()).count("ready") == 2


async def test_a_place_that_gets_free_is_taken():
    opened, clock, got, release = Opened("a", "b"), ManualClock(), [], anyio.Event()
    async with pool_of(opened, models("a", "b"), clock, max_loaded_models=1) as pool:
        async with anyio.create_task_group() as group, pool.lease("a"):
            group.start_soon(held, pool, "b", release, got)
            await wait_all_tasks_blocked()
            assert got == []
            release.set()
        assert got == [opened["b"]]
        assert states(pool) == {"a": "idle", "b": "ready"}


async def test_a_broken_model_fails_its_own_requests_and_is_tried_again():
    opened, clock = Opened("a", "b"), ManualClock()
    opened.errors["b"] = [TroupeError("no config.json in /secret/place/b"), OSError("disk")]
    async with pool_of(opened, models("a", "b"), clock) as pool:
        for expected, retry_s in [("no config.json in b", 5), ("disk", 10)]:
            with pytest.raises(NotReady, match=expected) as caught:
                async with pool.lease("b"):
                    pass
            assert caught.value.retry_after_s == retry_s
            count = opened.count("b")
            with pytest.raises(NotReady, match=expected):
                async with pool.lease("b"):
                    pass
            assert opened.count("b") == count, "it is not tried again before its time"
            async with pool.lease("a") as service:
                assert service is opened["a"]
            assert states(pool) == {"a": "ready", "b": "failed"}
            assert "b: " + expected in pool.readiness().detail
            clock.advance(retry_s)
        async with pool.lease("b") as service:
            assert service is opened["b"]
        assert (await pool.status()).failures == 2


async def test_all_who_wait_for_a_load_that_fails_are_told():
    opened, got, release = Opened(), [], anyio.Event()
    async with pool_of(opened, models("a")) as pool, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(held, pool, "a", release, got)
        await wait_all_tasks_blocked()
        opened["a"].load_error = TroupeError("broken")
        opened["a"].may_load.set()
        await wait_all_tasks_blocked()
        assert [type(error) for error in got] == [NotReady] * 3
        assert pool.readiness() == Readiness(False, "failed", "a: broken")


async def test_an_engine_that_died_for_good_is_freed_and_loaded_anew_later():
    opened, clock = Opened("a", "b"), ManualClock()
    async with pool_of(opened, models("a", "b"), clock) as pool:
        async with pool.lease("a") as first:
            first.state = Readiness(False, "failed", "the thread died")
        with pytest.raises(NotReady, match="the thread died"):
            async with pool.lease("a"):
                pass
        assert first.exited
        clock.advance(5)
        async with pool.lease("a") as second:
            assert second is not first


async def test_waits_end_by_cancel_by_time_and_are_bounded():
    opened, got, release = Opened(), [], anyio.Event()
    async with (
        pool_of(opened, models("a"), model_wait_s=0.05, max_model_waits=2) as pool,
        anyio.create_task_group() as group,
    ):
        group.start_soon(held, pool, "a", release, got, ("x", "y"))
        group.start_soon(held, pool, "a", release, got)
        await checkpoint()
        await checkpoint()
        with pytest.raises(NotReady, match="2 requests wait for models already"):
            async with pool.lease("a"):
                pass
        pool.cancel("unknown")
        pool.cancel("y")
        await anyio.sleep(0.1)  # the wait is bounded in real time
        assert isinstance(got[0], RequestCancelled)
        assert isinstance(got[1], NotReady)
        assert "not loaded after" in got[1].message
        assert got[1].retry_after_s > 0
        assert pool.entries()[0].users == 0


async def test_draining_tells_those_that_wait_and_ends_loads():
    opened, got, release = Opened("a"), [], anyio.Event()
    async with pool_of(opened, models("a", "b")) as pool, anyio.create_task_group() as group:
        group.start_soon(held, pool, "b", release, got)
        await wait_all_tasks_blocked()
        await pool.drain(1.0)
        await wait_all_tasks_blocked()
        assert [error.code for error in got] == ["shutting_down"]
        assert states(pool)["b"] == "idle"
        assert opened["a"].state.reason == "draining"
        assert pool.readiness() == Readiness(False, "draining") == pool.accepts()
        with pytest.raises(NotReady):
            async with pool.lease("b"):
                pass


async def test_status_and_metrics_are_of_all_models():
    opened = Opened("a", "b")
    async with pool_of(opened, models("a", "b", "c")) as pool:
        async with pool.lease("b"), pool.lease("a"):
            status = await pool.status()
            text = (await pool.metrics()).decode()
        assert [model.entry.users for model in status.models] == [1, 1, 0]
        assert status.models[2].status is None
        assert 'mlx_troupe_model_state{model_name="b",state="ready"} 1.0' in text
        assert 'mlx_troupe_model_state{model_name="c",state="idle"} 1.0' in text
        assert "mlx_troupe_model_loads_total 2.0" in text
        heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(heads) == len(set(heads))
