"""A server over a real runtime with a random model whose tokenizer knows thoughts and tool calls."""

import json
from contextlib import asynccontextmanager

import aiohttp
from openai import AsyncOpenAI

from mlx_troupe.api.server import listening
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.runtime import Runtime
from tests.models.tiny import build_tiny

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '<tool_call>\n{"name": tool_call.name}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def build_thinker(folder):
    """A tiny random model that opens a thought in its prompt unless told not to."""
    build_tiny("llama", folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    # The last ids are merges of letters; their rows are the marks' now.
    vocabulary = tokenizer["model"]["vocab"]
    first = len(vocabulary) - len(MARKS)
    lost = [token for token, place in vocabulary.items() if place >= first]
    for token in lost:
        del vocabulary[token]
    tokenizer["model"]["merges"] = [
        merge for merge in tokenizer["model"]["merges"] if "".join(merge) not in lost and merge not in lost
    ]
    tokenizer["added_tokens"] += [
        {
            "id": first + place,
            "content": mark,
            "special": mark.startswith("<t") and "think" in mark,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for place, mark in enumerate(MARKS)
    ]
    path.write_text(json.dumps(tokenizer))
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@asynccontextmanager
async def real_server(folder, **settings):
    """URL of a server over a real runtime."""
    async with (
        Runtime(model=str(folder), max_rows=32, served_name="tiny") as runtime,
        listening(runtime, ServerSettings(port=0, access_log=False, **settings)) as url,
    ):
        yield url


@asynccontextmanager
async def real_openai(folder, **settings):
    """An OpenAI client of such a server."""
    async with (
        real_server(folder, **settings) as url,
        AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


async def post(url, path, body, **headers):
    """Status and JSON of one request."""
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body, headers=headers) as response:
        return response.status, await response.json()
