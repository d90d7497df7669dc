"""The Chrome trace: its form, what a traced runtime records, and that an untraced one records nothing."""

from __future__ import annotations

import json
import threading
from itertools import pairwise

import pytest

from benchmarks.trace_summary import device_steps, read_events, summary
from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime import Generation, Runtime, SamplingParams
from mlx_troupe.runtime.errors import TroupeError
from mlx_troupe.runtime.tracing import DEVICE_TRACK, Tracer, open_tracer
from tests.api.tiny_server import post

GREEDY = SamplingParams(temperature=0.0)


def spans(path):
    return [event for event in read_events(path) if event["ph"] == "X"]


def thread_names(path):
    return {event["tid"]: event["args"]["name"] for event in read_events(path) if event["ph"] == "M"}


def test_spans_nest_on_their_thread(tmp_path):
    tracer = Tracer(tmp_path / "t.json")

    def work():
        with tracer.span("outer", rows=3), tracer.span("inner"):
            pass

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
    tracer.close()
    inner, outer = spans(tmp_path / "t.json")
    assert (inner["name"], outer["name"], outer["args"]) == ("inner", "outer", {"rows": 3})
    assert outer["ts"] == 0 <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["dur"]
    assert thread_names(tmp_path / "t.json")[outer["tid"]] == "worker"


def test_a_block_that_raises_is_recorded(tmp_path):
    tracer = Tracer(tmp_path / "t.json")
    with pytest.raises(KeyError), tracer.span("bad"):
        raise KeyError
    assert [event["name"] for event in tracer.events() if event["ph"] == "X"] == ["bad"]


def test_only_the_last_events_are_kept(tmp_path):
    tracer = Tracer(tmp_path / "t.json", max_events=3)
    for number in range(10):
        tracer.add(f"{number}", tracer.now())
    assert [event["name"] for event in tracer.events() if event["ph"] == "X"] == ["7", "8", "9"]


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path):
    with pytest.raises(TroupeError, match="cannot be written"):
        Runtime(model="demo", trace=str(tmp_path / "no" / "folder.json"))
    assert open_tracer("") is None


async def test_a_traced_runtime_records_every_thread_and_the_same_tokens(folder_of, tmp_path, alone):
    folder, path = str(folder_of("llama")), tmp_path / "trace.json"
    prompts = [tuple((7 * row + place) % 200 + 20 for place in range(20 + row)) for row in range(4)]
    settings = {"page_tokens": 16, "cache_dir": str(tmp_path), "cache_disk_bytes": 1 << 26, "trace": str(path)}
    async with Runtime(model=folder, **settings) as runtime, listening(runtime, ServerSettings(port=0)) as url:
        for prompt in prompts:
            wanted = Generation(tokens=prompt, max_tokens=6, sampling=GREEDY, ignore_eos=True)
            answer = await runtime.complete(wanted)
            assert list(answer.choices[0].tokens) == alone("llama", list(prompt), 6)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
        assert (await post(url, "/v1/chat/completions", body))[0] == 200
    found, names = spans(path), thread_names(path)
    by_thread = {}
    for span in found:
        by_thread.setdefault(names[span["tid"]], set()).add(span["name"].rstrip("0123456789 "))
    mlx = next(kinds for name, kinds in by_thread.items() if name.startswith("mlx-"))
    assert {"plan", "launch", "read", "commit", "prefill chunks", "join and leave", "adopt pages"} <= mlx
    assert {"decode: StepResult", "executor: StepPlan", "admission: Submit"} <= by_thread["MainThread"]
    assert "write page" in by_thread["prefix-cache-disk"]
    assert "TextService.render_chat" in by_thread["text-0"] | by_thread.get("text-1", set())
    stages = [(event["name"], event["ph"]) for event in read_events(path) if event["ph"] in "be"]
    assert stages.count(("decode", "b")) == stages.count(("decode", "e")) == 5
    assert "steps" in summary(path)


async def test_steps_of_the_device_follow_each_other(folder_of, tmp_path):
    path = tmp_path / "trace.json"
    async with Runtime(model=str(folder_of("llama")), overlap="build", trace=str(path)) as runtime:
        await runtime.complete(Generation(tokens=(30, 40, 50), max_tokens=12, sampling=GREEDY, ignore_eos=True))
    steps = [span for span in spans(path) if span["tid"] == DEVICE_TRACK]
    assert len(steps) == 12
    assert [span["args"]["step"] for span in steps] == sorted(span["args"]["step"] for span in steps)
    assert all(b["ts"] >= a["ts"] + a["dur"] - 0.01 for a, b in pairwise(steps))
    assert all(span["dur"] >= 0 for span in steps)


async def test_streamed_answers_show_their_socket_writes(folder_of, tmp_path):
    import aiohttp

    path = tmp_path / "trace.json"
    body = {"prompt": "hi", "max_tokens": 5, "stream": True, "ignore_eos": True}
    async with (
        Runtime(model=str(folder_of("llama")), trace=str(path)) as runtime,
        listening(runtime, ServerSettings(port=0)) as url,
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as response,
    ):
        text = await response.read()
    writes = [span for span in spans(path) if span["name"] == "socket write"]
    assert writes
    assert sum(span["args"]["bytes"] for span in writes) == len(text)


async def test_an_untraced_runtime_has_no_tracer_anywhere(folder_of):
    async with Runtime(model=str(folder_of("llama"))) as runtime:
        troupe = runtime._supervisor.troupe
        assert runtime.tracer is None
        assert all(actor.tracer is None for actor in troupe.cast)
        assert type(troupe.cast.executor._engine).__name__ == "MlxEngine"


def step(ts, dur, waited=500.0):
    return {"name": "step", "ts": ts, "dur": dur, "args": {"waited_us": waited}}


def test_idle_time_is_what_lies_between_steps():
    found = device_steps([step(0, 90), step(100, 90, waited=1.0), step(200, 100), step(5e6, 100)])
    assert found.number == 4
    assert found.idle_us == [10, 10]
    assert found.idle_share == pytest.approx(20 / 400)
    assert found.apart_us == [100, 110]
    assert found.unwaited == 1
    assert device_steps([step(0, 1)]) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', "<html>"])
def test_other_files_are_refused(text, tmp_path):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match="x"):
        summary(tmp_path / "x")


def test_the_file_is_json_that_viewers_read(tmp_path):
    tracer = Tracer(tmp_path / "t.json")
    tracer.add("a", tracer.now(), rows=[1, 2])
    tracer.close()
    found = json.loads((tmp_path / "t.json").read_text())
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    assert {event["ph"] for event in found["traceEvents"]} == {"M", "X"}
