"""Chat prompts through the model's template."""

from __future__ import annotations

import pytest

from mlx_troupe.runtime.errors import InvalidRequest

from . import made_tokenizers
from .conftest import opened

WRAPPER = made_tokenizers.byte_level()
HEADER = "<|im_start|>assistant\n"


async def prompt(service, messages, **options) -> str:
    """The rendered prompt as text, special tokens shown."""
    return WRAPPER.decode(await service.render_chat(messages, **options))


def user(content):
    return {"role": "user", "content": content}


async def test_renders_as_mlx_lm_does(byte_level_service):
    messages = [user("Hello, world!"), {"role": "assistant", "content": "日本語"}, user("again")]
    expected = WRAPPER.apply_chat_template(messages, add_generation_prompt=True)
    assert await byte_level_service.render_chat(messages) == expected
    assert await prompt(byte_level_service, messages[:1]) == f"<|im_start|>user\nHello, world!<|im_end|>\n{HEADER}"


async def test_text_parts_are_joined(byte_level_service):
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "world!"}]
    assert await prompt(byte_level_service, [user(parts)]) == await prompt(byte_level_service, [user("Hello, world!")])


async def test_other_parts_reach_the_template_as_they_are(byte_level_service):
    with pytest.raises(InvalidRequest):  # this template knows strings only
        await byte_level_service.render_chat([user([{"type": "image_url", "image_url": {"url": "x"}}])])


async def test_absent_content_does_not_crash_a_template(byte_level_service):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = await prompt(byte_level_service, messages, add_generation_prompt=False)
    assert text.endswith('<|im_start|>assistant\n<|im_end|>\n{"x": 1}')  # arguments are an object for the template


async def test_a_broken_argument_string_is_passed_on(byte_level_service):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    messages = [user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '{\\"x\\": ' in await prompt(byte_level_service, messages)


async def test_continue_final_message(byte_level_service):
    messages = [user("hi"), {"role": "assistant", "content": "Hello, wor"}]
    text = await prompt(byte_level_service, messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nHello, wor")


async def test_tools_and_template_arguments(byte_level_service):
    text = await prompt(byte_level_service, [user("hi")], tools=[{"name": "lookup"}], template_args={"style": "brief"})
    assert text.endswith(f"brieflookup{HEADER}")


@pytest.mark.parametrize(
    ("messages", "words"),
    [([{"role": "forbidden", "content": "x"}], "no such role here"), ([{"content": "x"}], "role"), ([], "refused")],
)
async def test_what_the_template_raises_is_the_clients_error(byte_level_service, messages, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        await byte_level_service.render_chat(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "return_dict"])
async def test_reserved_template_arguments_are_refused(byte_level_service, name):
    with pytest.raises(InvalidRequest) as caught:
        await byte_level_service.render_chat([user("hi")], template_args={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


async def test_a_model_without_template():
    with opened(lambda: made_tokenizers.byte_level(chat_template=None), threads=1) as service:
        with pytest.raises(InvalidRequest, match="no chat template") as caught:
            await service.render_chat([user("hi")])
        assert caught.value.param == "messages"


async def test_a_template_that_escapes_its_sandbox_is_refused():
    template = "{{ messages.__class__.__mro__ }}"
    with (
        opened(lambda: made_tokenizers.byte_level(chat_template=template), threads=1) as service,
        pytest.raises(InvalidRequest, match="unsafe"),
    ):
        await service.render_chat([user("hi")])
