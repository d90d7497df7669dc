"""Targets over real sockets and in process, with the fake service behind both."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.contenders import first_model
from benchmarks.http_stream import Target as Address
from benchmarks.measure import BenchPlan, measure, tokens_per_word
from benchmarks.targets.ask import Ask
from benchmarks.targets.http import HttpTarget
from benchmarks.targets.local import LocalTarget
from benchmarks.traffic.arrivals import Level, Poisson
from benchmarks.traffic.conversations import Workload
from benchmarks.traffic.drive import DriveSettings
from benchmarks.traffic.lengths import Fixed
from mlx_troupe.runtime.errors import Overloaded
from mlx_troupe.runtime.events import Failed, Finished, TextDelta, Usage
from tests.api.fake_service import FakeService, prompt_length
from tests.api.serving import serving

HI = ({"role": "user", "content": "hi"},)


def ask(**changes):
    return Ask(**({"messages": HI, "max_tokens": 4, "fields": {"temperature": 0.0}} | changes))


def endless(generation):
    return [TextDelta("word ", (number,)) for number in range(50)] + [asyncio.Event()]


def counted(generation):
    return [TextDelta("a", (1,)), Finished("length", Usage(prompt_length(generation), 3, 1))]


def http_target(client):
    return HttpTarget("http", Address.from_url(client.url, client.service.model.name))


def load(users=4, conversations=8, **workload):
    return BenchPlan(
        levels=(Level(f"{users} users", users=users),),
        workload=Workload(prompt=Fixed(8), output=Fixed(4), **workload),
        drive=DriveSettings(conversations=conversations, timeout_s=10.0),
        scrape_s=0.01,
    )


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_an_answer_over_http(endpoint):
    async with serving() as client:
        record = (await http_target(client).ask(ask(endpoint=endpoint))).record()
    assert record.error is None
    assert record.text == "Hello, wörld!"
    assert (record.tokens, record.cached_tokens, record.finish_reason) == (4, 1, "stop")
    assert record.sent_s <= record.text_times_s[0] <= record.end_s


async def test_the_same_answer_in_process():
    service = FakeService()
    target = LocalTarget("local", service)
    record = (await target.ask(ask())).record()
    assert not service.active
    assert (record.text, record.tokens, record.cached_tokens, record.error) == ("Hello, wörld!", 4, 1, None)
    assert target.received() > 0


@pytest.mark.parametrize("kind", ["http", "local"])
async def test_a_client_that_leaves_cancels_its_request(kind):
    async with serving(FakeService(endless)) as client:
        target = http_target(client) if kind == "http" else LocalTarget("local", client.service)
        answer = await target.ask(ask(leave_after=1))
        await asyncio.wait_for(client.service.until(lambda: not client.service.active), 10)
    assert answer.left
    assert answer.record().error is None
    assert answer.record().text.startswith("word")


async def test_faults_are_told_apart():
    plain = FakeService()
    async with serving(plain) as client:
        gone = http_target(client)
        refused = (await HttpTarget("x", Address.from_url(client.url, "no such model")).ask(ask())).record()
    assert refused.error.startswith("HTTP 404")
    assert (await gone.ask(ask())).record().error.startswith("no connection")
    async with serving(FakeService(lambda _: [TextDelta("a", (1,)), Failed("engine_failed", "broke")])) as client:
        assert (await http_target(client).ask(ask())).record().error.startswith("error event")
        assert (await LocalTarget("l", client.service).ask(ask())).record().error == "failed, engine_failed: broke"
    async with serving(FakeService(endless)) as client:
        assert (await http_target(client).ask(ask(timeout_s=0.05))).record().error.startswith("no end within")


async def test_refusals_in_process():
    class Full(FakeService):
        def stream(self, generation):
            raise Overloaded("the queue is full")

    record = (await LocalTarget("l", Full()).ask(ask())).record()
    assert record.error == f"refused, {Overloaded.code}: the queue is full"
    unknown = (await LocalTarget("l", Full()).ask(ask(fields={"no_such": 1}))).record()
    assert unknown.error.startswith("refused, unknown_field")


@pytest.mark.parametrize("kind", ["http", "local"])
async def test_a_whole_load_with_metrics(kind):
    async with serving() as client:
        target = http_target(client) if kind == "http" else LocalTarget("local", client.service)
        plan = load()
        found = await measure(target, plan, plan.levels[0], 0)
    figures = found.figures
    assert (figures.requests, figures.completed, figures.errors) == (8, 8, {})
    assert (figures.tokens, figures.cached_tokens, figures.count_source) == (32, 8, "usage")
    assert figures.server["mlx_troupe_num_requests_running_max"] >= 0
    assert len(found.samples) >= 2
    assert found.samples[0].at_s <= 0 < found.samples[-1].at_s


async def test_an_open_loop_over_sockets_with_clients_that_leave():
    async with serving(FakeService(endless)) as client:
        plan = load(conversations=20, leave_rate=1.0)
        found = await measure(http_target(client), plan, Level("p", schedule=Poisson(500.0)), 0)
        await asyncio.wait_for(client.service.until(lambda: not client.service.active), 10)
    assert (found.figures.left, found.figures.errors, found.figures.goodput_share) == (20, {}, 0.0)


async def test_errors_of_a_load_are_counted_by_kind():
    async with serving() as client:
        target = HttpTarget("x", Address.from_url(client.url, "no such model"))
        found = await measure(target, load(), load().levels[0], 0)
    assert found.figures.errors == {"HTTP 404": 8}
    assert found.figures.tokens_per_s == 0


async def test_lengths_are_calibrated_by_usage():
    async with serving(FakeService(counted)) as client:
        # The fake tokenizer counts characters; words of the text have 4 to 5 and a blank.
        assert 4 < await tokens_per_word(http_target(client), "chat", 5.0) < 7
    async with serving(FakeService(endless)) as client:
        assert await tokens_per_word(http_target(client), "chat", 0.05) is None


async def test_the_model_is_asked_for():
    async with serving() as client:
        target = http_target(client)
        assert await first_model(target) == client.service.model.name
        assert (await target.look("/v1/models"))[0] == 200
    with pytest.raises(ValueError, match="model-name"):
        await first_model(target)


async def test_a_server_without_metrics_is_asked_once():
    asked = []

    async def handle(reader, writer):
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = HttpTarget("bare", Address.from_url(f"http://127.0.0.1:{port}", "m"), footprint=lambda: 7.0)
        assert await target.scrape() == await target.scrape() == {"process_bytes": 7.0}
    assert asked == [b"/metrics"]


async def test_the_request_is_what_the_api_documents():
    seen = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append((head, json.loads(await reader.readexactly(length))))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        target = HttpTarget("bare", Address.from_url(f"http://127.0.0.1:{port}/proxy/v1", "m", "secret"))
        record = (await target.ask(ask(fields={"temperature": 0.5, "seed": 3}))).record()
    head, body = seen[0]
    assert head.startswith(b"POST /proxy/v1/chat/completions HTTP/1.1")
    assert b"Authorization: Bearer secret" in head
    assert body == {
        "model": "m", "messages": [HI[0]], "max_tokens": 4, "temperature": 0.5, "seed": 3, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert record.error == "the stream ended without a finish reason"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host", ("host", 443, "", True)),
        ("http://host/proxy/v1/", ("host", 80, "/proxy", False)),
        ("127.0.0.1:9", ("127.0.0.1", 9, "", False)),
        ("http://[::1]:8000", ("::1", 8000, "", False)),
    ],
)
def test_urls(url, expected):
    address = Address.from_url(url, "m")
    assert (address.host, address.port, address.prefix, address.secure) == expected
    assert b"Host: [::1]:8000" in Address.from_url("http://[::1]:8000", "m").get("/x")


async def test_https_is_spoken_to_https():
    """The handshake fails at a server that speaks plain HTTP, and that is a fault of the connection."""
    async with serving() as client:
        address = Address.from_url(client.url.replace("http:", "https:"), "m")
        record = (await HttpTarget("tls", address).ask(ask(timeout_s=5.0))).record()
    assert record.error.startswith("no connection: [SSL")
