"""Request fields that several routes share.

Clients are sloppy in harmless ways, and the types allow for it: every field may be null, and an integer may come as
`1.0`. Ranges are checked in `translate`, where the parameter can be named.
"""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float
Prompts = str | list[str | int | float | list[int | float]]


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class RefusedFields(msgspec.Struct, kw_only=True):
    """Fields that are known, mean something, and cannot be honoured: `HARMLESS` says which values ask for nothing."""

    adapter: Any = None
    adapters: Any = None
    add_special_tokens: Any = None
    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    documents: Any = None
    draft_model: Any = None
    dry_multiplier: Any = None
    function_call: Any = None
    functions: Any = None
    include_stop_str_in_output: Any = None
    logits_processors: Any = None
    lora: Any = None
    mirostat: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    role_mapping: Any = None
    service_tier: Any = None
    skip_special_tokens: Any = None
    store: Any = None
    suffix: Any = None
    tfs_z: Any = None
    top_n_sigma: Any = None
    truncate_prompt_tokens: Any = None
    typical_p: Any = None
    use_beam_search: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`; the schema is always enforced, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`: text, json_object, json_schema; regex and grammar are not OpenAI's."""

    type: str | None = None
    json_schema: JsonSchemaFormat | None = None
    schema: Any = None
    regex: str | None = None
    grammar: str | None = None


class ConstraintFields(RefusedFields, kw_only=True):
    """What the output must match, in OpenAI's, vLLM's and llama.cpp's words. At most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None


class RequestFields(ConstraintFields, kw_only=True):
    """Fields of both completion routes that are honoured.

    `timeout` (seconds), `priority` (lower is sooner), `cache`, `cache_salt`, `return_progress`, `ignore_eos`,
    `min_tokens` and `stop_token_ids` are not OpenAI's; the sampling names beyond OpenAI's are those of mlx_lm.server.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Number | None = None
    stop: str | list[str] | None = None
    max_tokens: Number | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Number | None = None
    min_p: Number | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    repetition_penalty: Number | None = None
    repetition_context_size: Number | None = None
    presence_penalty: Number | None = None
    presence_context_size: Number | None = None
    frequency_penalty: Number | None = None
    frequency_context_size: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Number | None = None
    ignore_eos: bool | None = None
    min_tokens: Number | None = None
    stop_token_ids: list[Number] | None = None
    timeout: Number | None = None
    priority: Number | None = None
    cache: bool | None = None
    cache_salt: str | None = None
    return_progress: bool | None = None


# Values, besides null, that ask for what is done anyway.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "bad_words": ([],),
    "documents": ([],),
    "dry_multiplier": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tfs_z": (1,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
