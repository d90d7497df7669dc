"""A real runtime and server whose model says what the test wrote, token by token.

Everything is real but the engine: actors, text, stop strings, splitters, events, encoders and sockets. A request's seed
says which script its rows follow; a token of a script may be a single byte.
"""

import json
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime import Runtime, supervisor
from mlx_troupe.runtime.engine_protocol import EngineFacts
from mlx_troupe.runtime.generation import ModelInfo
from mlx_troupe.runtime.grammar import GrammarService
from mlx_troupe.runtime.loading import LoadedEngine
from mlx_troupe.runtime.output import Outputs
from mlx_troupe.runtime.request import PLACEHOLDER
from mlx_troupe.runtime.text import TextService
from tests.fake_engine import FakeEngine
from tests.output.samples import dialect
from tests.text.made_tokenizers import byte_level

CONTEXT = 1 << 16


class ScriptedEngine(FakeEngine):
    """Says the script of the row's seed, then the end token for ever."""

    def __init__(self, vocab_size: int, end: int) -> None:
        facts = EngineFacts(vocab_size=vocab_size, context_length=CONTEXT, page_bytes=16)
        super().__init__(facts, page_tokens=256, record=False)
        self.scripts: dict[int, list[int]] = {}
        self._end = end

    def _next(self, number: int) -> int:
        token = super()._next(number)
        if token == PLACEHOLDER:
            return token
        row = self.rows[number]
        script, place = self.scripts.get(row.join.sampling.seed or 0, []), row.position - 1
        row.token = script[place] if place < len(script) else self._end
        return row.token


class Stage:
    """The server, and what tests do with it."""

    def __init__(self, engine: ScriptedEngine, text: TextService, url: str, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.url = url
        self._text = text
        self._session = session
        pieces = text._pieces
        assert pieces is not None
        self._byte_ids = {piece.encode() if isinstance(piece, str) else piece: i for i, piece in enumerate(pieces)}

    def script(self, text: str | bytes) -> int:
        """Put down what a row says, a token a byte; returns the seed to ask for."""
        data = text.encode() if isinstance(text, str) else text
        seed = len(self.engine.scripts) * 10 + 1
        self.engine.scripts[seed] = [self._byte_ids[data[at : at + 1]] for at in range(len(data))]
        return seed

    async def both(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], "Streamed"]:
        """The whole answer and the streamed one."""
        async with self._session.post(self.url + path, json=body) as response:
            whole = await response.json()
            assert response.status == 200, whole
        async with self._session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200
            return whole, Streamed((await response.read()).decode())


class Streamed:
    """An event stream put together again, after checks of its form."""

    def __init__(self, data: str) -> None:
        blocks = [block for block in data.split("\n\n") if block and not block.startswith(":")]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        assert data.endswith("\n\n")
        events = [block.removeprefix("data: ") for block in blocks]
        assert events[-1] == "[DONE]"
        assert events.count("[DONE]") == 1
        self.deltas: list[str] = []
        self.thought = ""
        self.calls: list[list[str]] = []
        self.reason: str | None = None
        for event in events[:-1]:
            for choice in json.loads(event)["choices"]:
                assert self.reason is None, "something came after the finish reason"
                self._take(choice)
        assert self.reason is not None, "there was no finish reason"

    def _take(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta", {})
        text = choice.get("text") or delta.get("content") or ""
        if text:
            self.deltas.append(text)
        self.thought += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                assert call["index"] == len(self.calls)
                self.calls.append([call["function"]["name"], ""])
            self.calls[call["index"]][1] += call["function"]["arguments"]
        self.reason = choice["finish_reason"]

    @property
    def text(self) -> str:
        return "".join(self.deltas)


@asynccontextmanager
async def scripted(monkeypatch, parser: str | None = None, *, thinks: bool = False):
    """A server whose model writes calls as `parser` reads them; None knows neither thoughts nor calls."""
    text = TextService(byte_level, threads=1, vocab_size=640)
    end = next(iter(text.eos_token_ids))
    engine = ScriptedEngine(640, end)
    marks = text.dialect if parser is None else dialect(parser, thinks=thinks)
    if parser is not None and thinks:  # no token of a prompt opens a thought
        marks = msgspec.structs.replace(marks, think_start_tokens=(-2,), think_end_tokens=(-3,))
    outputs = Outputs(marks, GrammarService(text.token_bytes, text.special_token_ids, text.eos_token_ids))
    info = ModelInfo(name="scripted", context_length=CONTEXT, vocab_size=640)

    async def load(config, clock, thread, **_):
        return LoadedEngine(
            engine=engine, facts=engine.facts, thread=thread, text=text, info=info, input_ids=640,
            end_ids=text.eos_token_ids, outputs=outputs,
        )  # fmt: skip

    monkeypatch.setattr(supervisor, "load_engine", load)
    async with (
        Runtime(prefix_cache_bytes=0, max_rows=64) as runtime,
        listening(runtime, ServerSettings(port=0, access_log=False)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Stage(engine, text, url, session)
