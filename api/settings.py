"""Settings of the server: plain data, built once at start."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server. A body, list or header past its bound is refused before any work.

    Attributes:
        host: address to listen on; anything but this machine itself needs --insecure.
        port: port to listen on; 0 takes a free one and prints it.
        insecure: allow an address that other machines reach, though there are no API keys.
        api_key_file: file of API keys, one a line, `name:key`; MLX_TROUPE_API_KEYS adds more, between commas.
        max_concurrent_per_key: most requests at once of one key; none is no limit.
        max_requests_per_minute_per_key: most requests a minute of one key; none is no limit.
        page: serve a page at / to chat and to watch the server; it loads without a key and asks for one.
        share_cache_across_keys: with several API keys, let requests find cached prefixes that others' keys brought; how
            fast an answer comes then tells whether somebody sent the same text before.
        cors_origins: web pages' origins that may call this server, such as https://chat.example; "*" allows all.
        allowed_hosts: names clients may call this server by, besides localhost and addresses; "*" allows all.
        max_connections: most connections at once.
        max_connections_per_address: most of them from one address; none is no limit.
        header_timeout_s: longest a request's headers may take from their first byte.
        max_body_bytes: largest request body.
        max_messages: most messages of one chat.
        max_prompts: most prompts of one completion request.
        max_embedding_inputs: most inputs of one embedding request.
        body_timeout_s: longest a client may take to send its body.
        write_timeout_s: a client that reads nothing for so long is cut off and its request cancelled.
        write_buffer_bytes: output of one stream that may wait in its socket's buffer.
        keepalive_interval_s: a silent stream gets a comment, with the prefill's progress, so often.
        idle_timeout_s: a connection without a request is closed after so long.
        request_timeout_s: deadline of requests that name none; none is no deadline.
        stored_responses_bytes: room for the answers of /v1/responses that are stored; 0 stores none.
        stored_responses_ttl_s: a stored answer is forgotten after so long.
        default_temperature: temperature of requests that name none.
        default_top_p: top_p of requests that name none.
        default_top_k: top_k of requests that name none; 0 keeps all.
        default_min_p: min_p of requests that name none.
        default_repetition_penalty: repetition_penalty of requests that name none.
        template_args: variables that requests may set in the chat template.
        access_log: log a line a request.
        log_level: least severe log lines to show.
        log_format: text for people, or json, an object a line.
        otel: send a span a request to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names; needs the extra otel.
        api_process: "on" serves HTTP and runs the model in a process each; "auto" does so from 4 cores on.
        event_loop: "auto" takes uvloop when it is installed.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    insecure: bool = False
    api_key_file: str | None = None
    max_concurrent_per_key: Count | None = None
    max_requests_per_minute_per_key: Count | None = None
    page: bool = True
    share_cache_across_keys: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_connections: Count = 2048
    max_connections_per_address: Count | None = None
    header_timeout_s: Seconds = 15.0
    max_body_bytes: Count = 4 << 20
    max_messages: Count = 2048
    max_prompts: Count = 64
    max_embedding_inputs: Count = 2048
    body_timeout_s: Seconds = 60.0
    write_timeout_s: Seconds = 30.0
    write_buffer_bytes: Count = 64 << 10
    keepalive_interval_s: Seconds = 10.0
    idle_timeout_s: Seconds = 75.0
    request_timeout_s: Seconds | None = None
    stored_responses_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 << 20
    stored_responses_ttl_s: Seconds = 86400.0
    default_temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    default_top_p: Share = 1.0
    default_top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    default_min_p: Share = 0.0
    default_repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    template_args: tuple[str, ...] = (
        "enable_thinking",
        "thinking",
        "thinking_budget",
        "preserve_thinking",
        "reasoning_effort",
    )
    access_log: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    otel: bool = False
    api_process: Literal["auto", "on", "off"] = "auto"
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
