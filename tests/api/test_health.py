"""`/livez`, `/readyz`, `/metrics`, and requests while nothing is served."""

import pytest

from mlx_troupe.runtime.service import Readiness

from .fake_service import FakeService
from .serving import Client, serving


async def test_ready(client: Client):
    assert (await client.get("/livez")).json == {"status": "live"}
    answer = await client.get("/readyz")
    assert answer.status == 200
    assert answer.json == {"status": "ready", "reason": "", "detail": ""}


@pytest.mark.parametrize("reason", ["loading", "restarting", "draining", "stalled", "failed"])
async def test_unready(client: Client, reason):
    client.service.state = Readiness(ready=False, reason=reason, detail="step 5")
    answer = await client.get("/readyz")
    assert answer.status == 503
    assert answer.json == {"status": "unready", "reason": reason, "detail": "step 5"}
    assert int(answer.headers["Retry-After"]) >= 1
    assert (await client.get("/livez")).status == 200
    for stream in (False, True):
        answer = await client.chat(stream=stream)
        assert answer.status == 503
        assert answer.error["code"] == ("not_ready" if reason == "stalled" else reason)
        assert answer.error["type"] == "server_error"
        assert int(answer.headers["Retry-After"]) >= 1
    assert client.service.submitted == []


async def test_models_while_loading():
    async with serving(FakeService(loaded=False)) as client:
        answer = await client.get("/v1/models")
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "3"


async def test_status(client: Client):
    answer = await client.get("/v1/troupe/status")
    assert answer.status == 200
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.json["model"] == "fake"
    assert answer.json["readiness"]["ready"] is True
    assert answer.json["statistics"]["running"] == 0


async def test_metrics(client: Client):
    await client.chat()
    await client.chat(n=99)
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = answer.body.decode()
    assert "mlx_troupe_num_requests_running 0" in text  # the runtime's
    assert 'mlx_troupe_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'mlx_troupe_http_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert 'mlx_troupe_http_request_duration_seconds_count{route="/v1/chat/completions"} 2.0' in text
    assert 'mlx_troupe_http_errors_total{code="invalid_value"} 1.0' in text


async def test_metric_labels_hold_nothing_that_clients_write(client: Client):
    for number in range(20):
        await client.get(f"/nope/{number}")
        await client.get(f"/v1/models/made-up-{number}")
        await client.request("DELETE", f"/v1/requests/made-up-{number}")
    assert "made-up" not in (await client.get("/metrics")).body.decode()
