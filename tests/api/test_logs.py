"""The log in both forms, and request ids in it."""

import asyncio
import io
import json
import logging

import pytest

from mlx_troupe.api.logs import JsonFormatter, current_request, set_up_logging
from mlx_troupe.runtime.events import Failed

from .fake_service import FakeService
from .serving import CHAT, HI, serving


@pytest.fixture
def lines():
    """Records of our loggers as JSON objects."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("mlx_troupe")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(before)


async def test_a_request_is_one_object(lines):
    async with serving(access_log=True) as client:
        answer = await client.post(CHAT, HI, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["X-Request-Id"] == "mine-1"
    (line,) = [line for line in lines() if line["logger"] == "mlx_troupe.access"]
    assert line["request_id"] == "mine-1"
    assert (line["method"], line["route"], line["status"], line["error"]) == ("POST", CHAT, 200, None)
    assert line["time"].endswith("+00:00")
    assert line["seconds"] >= 0


async def test_faults_carry_the_requests_id_whoever_logs_them(lines):
    script = [Failed("engine_failed", "boom\nforged line", None, None)]
    async with serving(FakeService(lambda _: list(script)), access_log=True) as client:
        asked = [client.post(CHAT, HI, headers={"X-Request-Id": f"mine-{place}"}) for place in range(4)]
        answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} == {500}
    faults = [line for line in lines() if line["level"] == "error"]
    assert {line["request_id"] for line in faults} == {"mine-0", "mine-1", "mine-2", "mine-3"}
    accesses = [line for line in lines() if line["logger"] == "mlx_troupe.access"]
    assert {line["error"] for line in accesses} == {"engine_failed"}
    assert current_request.get() == ""


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, 'a"b', "a\\b", "ünï"])
async def test_odd_ids_are_replaced(given, lines):
    async with serving(access_log=True) as client:
        answer = await client.post(CHAT, HI, headers={"X-Request-Id": given})
    found = answer.headers["X-Request-Id"]
    assert found != given
    assert len(found) == 32
    assert lines()[-1]["request_id"] == found


def test_nothing_breaks_a_line():
    record = logging.LogRecord("x", logging.ERROR, "", 0, "a\nb\u2028c\x85d", (), None)
    assert "\n" not in JsonFormatter().format(record)
    assert JsonFormatter().format(record).isascii()
    assert json.loads(JsonFormatter().format(record))["message"] == "a\nb\u2028c\x85d"


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_setting_chooses(form, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("mlx_troupe"), "level", logging.NOTSET)
    set_up_logging("info", form)
    logging.getLogger("mlx_troupe.here").info("well %d", 1)
    shown = stream.getvalue()
    assert ("INFO mlx_troupe.here: well 1" in shown) if form == "text" else json.loads(shown)["message"] == "well 1"
