"""The one frozen configuration of an engine, built once by the caller."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one runtime.

    Attributes:
        model: folder, Hugging Face id, `.gguf` file or "demo"; None is the default model.
        revision: pin of the hub revision.
        quantize: "q4" or "q8" quantises on load; None leaves the weights alone.
        served_name: name clients use; empty is the model's own.
        max_rows: most rows decoding at once (and being prefilled).
        max_queue: most requests waiting; more are refused with Overloaded.
        max_context_tokens: cap on the model's own context length; None is no cap.
        max_tokens_default: output cap of requests that name none; None is the rest of the context.
        prefill_chunk_tokens: most prompt tokens of one forward when nobody decodes.
        stall_target_s: longest a chunk may hold running rows up.
        fair_share: decode is owed this share of a chunk's time before the next one.
        overlap: "auto" measures at start, "launch" and "build" force a way, "off" is one step at a time.
        page_tokens: tokens of one page of the prefix cache.
        prefix_cache_bytes: RAM the prefix cache may hold; 0 turns it off.
        cache_dir: folder of the prefix cache on disk; empty is `prefixes` in the user's cache folder.
        cache_disk_bytes: disk the prefix cache may hold, for all models together; 0 leaves the disk alone.
        cache_spill: "write-through" writes pages to disk once they are stored, "write-back" when RAM gets full and at
            the end.
        cache_spill_queue: most pages waiting for the disk; more are not written.
        cache_restore_timeout_s: longest a request waits for pages from disk before its prompt is computed.
        cache_max_stores: stores under way at which no new prompt begins.
        cache_flush_timeout_s: longest a stop waits for pages on their way to disk.
        cache_salt: keeps the prefixes of this runtime apart, besides what requests bring.
        warm_prompts: file of prefixes to compute at start, one JSON value a line: a string, a list of token ids, or
            {"messages": [...]}; empty is none.
        memory: how much of the machine may be used: 70, 80 or 90 %.
        memory_limit_bytes: most that this process may use; None leaves that to `memory`.
        step_timeout_s: a step older than this turns readiness red.
        hang_timeout_s: a step older than this is given up, as is an engine that does nothing for so long though
            requests wait: they end with an error and it is started anew.
        restart_limit: how often within ten minutes a failed engine is started anew; 0 is never.
        drain_timeout_s: how long a stop waits for running requests.
        queue_timeout_s: longest a request waits for admission; None is for ever.
        text_threads: tokenizer threads.
        event_buffer: most undelivered events of one request before they are merged.
        trace: file for a Chrome trace of steps, messages and I/O, written at the end; empty records none.
        inbox: bound of each actor's inbox, in messages.
        length_classes: upper bounds, in tokens, of the KV length classes.
        embedding_pooling: how hidden states become an embedding: "mean", "last", or what the model's folder says
            ("auto"; the mean if it says nothing).
        tool_parser: how the model writes tool calls: a parser of mlx-lm, "harmony" or "none"; None asks the tokenizer.
        allow_download: whether a hub id may be fetched.
    """

    model: str | None = None
    revision: str | None = None
    quantize: Literal["q4", "q8"] | None = None
    served_name: str = ""
    max_rows: Count = 64
    max_queue: Count = 256
    max_context_tokens: Count | None = None
    max_tokens_default: Count | None = None
    prefill_chunk_tokens: Count = 2048
    stall_target_s: Seconds = 0.25
    fair_share: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.2
    overlap: Literal["auto", "launch", "build", "off"] = "auto"
    page_tokens: Count = 256
    prefix_cache_bytes: NotNegative = 1 << 30
    cache_dir: str = ""
    cache_disk_bytes: NotNegative = 0
    cache_spill: Literal["write-through", "write-back"] = "write-through"
    cache_spill_queue: Count = 64
    cache_restore_timeout_s: Seconds = 5.0
    cache_max_stores: Count = 16
    cache_flush_timeout_s: Seconds = 20.0
    cache_salt: str = ""
    warm_prompts: str = ""
    memory: Literal["safe", "balanced", "aggressive"] = "balanced"
    memory_limit_bytes: Count | None = None
    step_timeout_s: Seconds = 60.0
    hang_timeout_s: Seconds = 180.0
    restart_limit: NotNegative = 3
    drain_timeout_s: Seconds = 30.0
    queue_timeout_s: Seconds | None = None
    text_threads: Count = 2
    event_buffer: Count = 64
    trace: str = ""
    inbox: Count = 1024
    length_classes: tuple[int, ...] = (1024, 4096, 16384, 65536, 262144, 1048576)
    embedding_pooling: Literal["auto", "mean", "last"] = "auto"
    tool_parser: str | None = None
    allow_download: bool = False
