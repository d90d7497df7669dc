"""Spans of requests, through OpenTelemetry's own SDK."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mlx_troupe.api.cli import main
from mlx_troupe.api.tracing import OpenTelemetryTracing
from mlx_troupe.runtime.events import Failed, Finished, TextDelta, Usage

from .fake_service import FakeService, Gate
from .serving import CHAT, HI, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
USAGE = Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=3, queue_s=0.5, prefill_s=0.25, decode_s=1.0)
SECRET = "the prompt is secret"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield OpenTelemetryTracing(provider, owned=True)
    provider.shutdown()


def told():
    return FakeService(lambda _: [TextDelta(SECRET, (1,)), Finished("stop", USAGE)])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_tells_what_happened(exporter, tracing, stream):
    async with serving(told(), tracing=tracing) as client:
        body = {"messages": [{"role": "user", "content": SECRET}], "stream": stream, "n": 1}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine", "Authorization": "Bearer hidden"}
        assert (await client.post(CHAT, body, headers=headers)).status == 200
        await client.get("/livez")
        await client.get("/metrics")
    (span,) = exporter.get_finished_spans()
    assert span.name == f"POST {CHAT}"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    found = dict(span.attributes)
    assert found["http.response.status_code"] == 200
    assert found["mlx_troupe.request_id"] == "mine"
    assert found["gen_ai.request.model"] == "fake/model"
    assert found["gen_ai.usage.input_tokens"] == 7
    assert found["gen_ai.usage.cache_read.input_tokens"] == 2
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert [event.name for event in span.events] == ["queued", "prefill", "decode"]
    times = [event.timestamp - span.start_time for event in span.events]
    assert times == [0, 500_000_000, 750_000_000]
    assert SECRET not in span.to_json()
    assert "hidden" not in span.to_json()


async def test_choices_are_added_up(exporter, tracing):
    usages = [Finished("stop", USAGE), Finished("length", USAGE, index=1)]
    async with serving(FakeService(lambda _: list(usages)), tracing=tracing) as client:
        await client.chat(n=2, stream=True)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert len(span.events) == 3


async def test_refusals_faults_and_leavers(exporter, tracing):
    script = [TextDelta("a", (1,)), Gate(), Failed("engine_failed", "boom", None, None)]
    async with serving(FakeService(lambda _: list(script)), tracing=tracing) as client:
        await client.chat(n=99)
        await client.get("/nothing")
        async with client.raw(CHAT, HI | {"stream": True}) as request:
            await request.until(b'"a"')
            request.abort()
        await client.service.until(lambda: not client.service.active)
        client.service.script = lambda _: [script[0], script[2]]
        await client.chat(stream=True)
    spans = exporter.get_finished_spans()
    found = [(span.attributes["http.response.status_code"], span.attributes.get("error.type")) for span in spans]
    assert found == [(400, "invalid_value"), (404, "not_found"), (499, None), (200, "engine_failed")]
    assert [span.status.status_code.name for span in spans] == ["UNSET", "UNSET", "ERROR", "ERROR"]
    assert "/nothing" not in spans[1].name


def test_without_the_package_the_setting_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert main(["serve", "demo", "--otel"], environment={}) == 2
    assert "mlx-troupe[otel]" in capsys.readouterr().err


def test_without_tracing_nothing_of_it_is_imported():
    code = "import sys, mlx_troupe.api.app; print('opentelemetry' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.strip() == b"False"
