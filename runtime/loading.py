"""Brings a model up: found on disk, loaded on its MLX thread, measured, and given its text service."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

import anyio
import msgspec

from .engine_protocol import Engine, EngineFacts
from .generation import ModelInfo
from .grammar import GrammarService
from .mlx_thread import MlxThread
from .output import Outputs
from .reading import Pooling
from .text import TextService
from .text.turns import TurnFacts, learn_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from .clock import Clock
    from .config import RuntimeConfig
    from .models.loader import LoadedModel
    from .models.progress import Report
    from .models.spec import ModelSpec
    from .peers import Peer
    from .tracing import Tracer

T = TypeVar("T")
REST_SHARE = 0.3
LONGEST_REST_S = 0.2
DEFAULT_CONTEXT_TOKENS = 8192
"""For models that name no limit."""


class LoadedEngine(msgspec.Struct, frozen=True):
    """An engine ready to step.

    Attributes:
        input_ids: token ids of prompts lie below it.
        end_ids: the model's own end tokens.
        outputs: constrains outputs and takes them apart.
        fingerprint: of the weights, see models/fingerprint.py.
        turns: what the chat template does from turn to turn.
        pooling: how prompts become vectors, unless a request says.
    """

    engine: Engine
    facts: EngineFacts
    thread: MlxThread
    text: TextService
    info: ModelInfo
    input_ids: int
    end_ids: frozenset[int]
    outputs: Outputs
    fingerprint: str = ""
    turns: TurnFacts = TurnFacts()
    pooling: Pooling = "mean"


async def on_thread(thread: MlxThread, job: Callable[[], T]) -> T:
    """Run a job on an MLX thread and wait for what it returns or raises (which does not end the thread)."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not done.done():
            set_it()

    def run() -> None:
        try:
            value = job()
        except Exception as error:
            failure = error
            loop.call_soon_threadsafe(settle, lambda: done.set_exception(failure))
        else:
            loop.call_soon_threadsafe(settle, lambda: done.set_result(value))

    thread.submit(run)
    return await done


async def load_engine(
    config: RuntimeConfig,
    clock: Clock,
    thread: MlxThread,
    *,
    progress: Report | None = None,
    tracer: Tracer | None = None,
    peer: Peer | None = None,
) -> LoadedEngine:
    """Find, load and measure the model of `config`. A `tracer` records what its threads will do.

    With a `peer`, room is made before anything is loaded, and the other engines that decode go before.

    Raises:
        ModelError: it cannot be found, is unsafe or unsupported; the text says what to do.
    """
    spec = await anyio.to_thread.run_sync(lambda: _resolve(config, progress), abandon_on_cancel=True)
    if peer is not None:
        await peer.make_room(await anyio.to_thread.run_sync(_expected_bytes, spec))
    loaded, engine, facts = await on_thread(thread, lambda: _build(spec, config, clock, tracer, progress, peer))
    if peer is not None:
        peer.own_bytes = loaded.weight_bytes
    text = await anyio.to_thread.run_sync(lambda: _text_service(spec, config, loaded.vocab_size, tracer))
    info = ModelInfo(
        name=config.served_name or spec.served_name,
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        layout=facts.layout,
        quantized=_quantized(loaded.config),
        weight_bytes=loaded.weight_bytes,
        created=int(time.time()),
        has_chat_template=bool(getattr(loaded.tokenizer, "has_chat_template", False)),
        aliases=tuple(
            {spec.name, spec.served_name, config.model or spec.name} - {config.served_name or spec.served_name}
        ),
    )
    end_ids = loaded.eos_ids | text.eos_token_ids
    outputs = Outputs(text.dialect, GrammarService(text.token_bytes, text.special_token_ids, end_ids))
    identity = await anyio.to_thread.run_sync(lambda: _fingerprint(spec, config))
    turns = await learn_turns(text)
    pooling = await anyio.to_thread.run_sync(lambda: _pooling(spec, config))
    return LoadedEngine(
        engine, facts, thread, text, info, loaded.vocab_size, end_ids, outputs, identity, turns, pooling
    )


def _aliases(spec: ModelSpec, config: RuntimeConfig) -> tuple[str, ...]:
    """What clients may call the model besides its name: what the operator called it."""
    names = {spec.name, spec.served_name, config.model or spec.name}
    return tuple(sorted(names - {config.served_name or spec.served_name}))


def _resolve(config: RuntimeConfig, progress: Report | None) -> ModelSpec:
    from .heap import keep_freed, reserve
    from .models.blas import load_blas
    from .models.machine import is_linux_cpu
    from .models.progress import ignore
    from .models.resolve import resolve

    load_blas()
    if is_linux_cpu():
        keep_freed()
        reserve(config.cache_disk_bytes)
    return resolve(
        config.model,
        revision=config.revision,
        quantize=config.quantize,
        allow_download=config.allow_download,
        served_name=config.served_name,
        progress=progress or ignore,
    )


def _fingerprint(spec: ModelSpec, config: RuntimeConfig) -> str:
    """Only what the disk holds outlives the model."""
    from .models.fingerprint import fingerprint

    return fingerprint(spec) if config.cache_disk_bytes else ""


def _pooling(spec: ModelSpec, config: RuntimeConfig) -> Pooling:
    from .models.pooling import pooling_of

    return pooling_of(spec.path) if config.embedding_pooling == "auto" else config.embedding_pooling


def _build(
    spec: ModelSpec,
    config: RuntimeConfig,
    clock: Clock,
    tracer: Tracer | None,
    progress: Report | None,
    peer: Peer | None,
) -> tuple[LoadedModel, Engine, EngineFacts]:
    from .engine.build import build_engine
    from .models.loader import load

    loaded = load(spec, evaluated=_paced(spec, progress, clock, peer))
    context = loaded.context_length or DEFAULT_CONTEXT_TOKENS
    if config.max_context_tokens is not None:
        context = min(context, config.max_context_tokens)
    engine = build_engine(
        loaded.model,
        config,
        clock,
        vocab_size=loaded.vocab_size,
        context_length=context,
        xtc_special=tuple(sorted(loaded.eos_ids | _newline_ids(loaded.tokenizer))),
        tracer=tracer,
        limit=None if peer is None else peer.limit,
    )
    return loaded, engine, engine.facts


def _paced(spec: ModelSpec, progress: Report | None, clock: Clock, peer: Peer | None) -> Callable[[int, int], None]:
    """Called after each piece of the weights, with bytes done and in all: tells of it, and lets engines that decode
    have the machine for a share of the piece's time."""
    from .models.progress import Progress

    stage = f"load {spec.served_name}"
    began_s = clock.now()

    def evaluated(done: int, total: int) -> None:
        nonlocal began_s
        if progress is not None:
            progress(Progress(stage, done, total))
        if peer is not None and peer.others_decode:
            time.sleep(min(LONGEST_REST_S, REST_SHARE * (clock.now() - began_s)))
        began_s = clock.now()

    return evaluated


def _expected_bytes(spec: ModelSpec) -> int:
    """About what the weights will take."""
    from .models.weights import resident_bytes

    return resident_bytes(spec)


def _newline_ids(tokenizer: object) -> frozenset[int]:
    """mlx-lm keeps line ends out of XTC, as it does end tokens."""
    try:
        return frozenset(tokenizer.encode("\n", add_special_tokens=False)[-1:])  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return frozenset()


def _text_service(spec: ModelSpec, config: RuntimeConfig, vocab_size: int, tracer: Tracer | None) -> TextService:
    from .models.loader import load_tokenizer
    from .models.tool_formats import tool_format

    return TextService(
        lambda: load_tokenizer(spec),
        threads=config.text_threads,
        vocab_size=vocab_size,
        tool_format=tool_format(config.tool_parser),
        tracer=tracer,
    )


def _quantized(config: dict[str, object]) -> str | None:
    found = config.get("quantization")
    if not isinstance(found, dict):
        return None
    return f"{found.get('bits')} bits, group {found.get('group_size')}"
