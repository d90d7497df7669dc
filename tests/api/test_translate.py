"""Single fields: what sloppy clients send is understood, what cannot be honoured is refused by name."""

import json

import pytest

from mlx_troupe.api.errors import ApiError
from mlx_troupe.api.settings import ServerSettings
from mlx_troupe.api.translate import chat_generation, completion_generations
from mlx_troupe.api.wire.chat import ChatRequest
from mlx_troupe.api.wire.completions import CompletionRequest
from mlx_troupe.api.wire.decode import CHAT, COMPLETION, decode
from mlx_troupe.api.wire.fields import HARMLESS, RefusedFields

SETTINGS = ServerSettings()
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(settings=SETTINGS, **fields):
    return chat_generation(decode(CHAT, json.dumps({"messages": MESSAGES} | fields).encode()), settings, "id")


def completion(settings=SETTINGS, **fields):
    body = json.dumps({"prompt": "hi"} | fields).encode()
    return completion_generations(decode(COMPLETION, body), settings, "id")


def refusal(call, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return caught.value


def test_explicit_nulls_are_as_if_absent():
    nothing = dict.fromkeys(set(ChatRequest.__struct_fields__) - {"messages"})
    assert chat(**nothing) == chat()
    nothing = dict.fromkeys(set(CompletionRequest.__struct_fields__) - {"prompt"})
    assert completion(**nothing) == completion()


def test_unknown_fields_are_ignored():
    assert chat(seed=1, user="me", metadata={"a": "b"}, parallel_tool_calls=True, made_up=[1]) == chat(seed=1)


def test_integers_may_come_as_floats():
    generation = chat(max_tokens=5.0, n=2.0, top_k=3.0, seed=7.0, min_tokens=1.0, logprobs=True, top_logprobs=2.0)
    assert generation.max_tokens == 5
    assert generation.n == 2
    assert generation.sampling.top_k == 3
    assert generation.sampling.seed == 7
    assert generation.sampling.top_logprobs == 2
    assert type(generation.max_tokens) is int
    assert refusal(chat, max_tokens=5.5).param == "max_tokens"
    assert completion(prompt=[1.0, 2])[0].tokens == (1, 2)


def test_sampling_fields():
    sampling = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        xtc_probability=0.2,
        xtc_threshold=0.3,
        repetition_penalty=1.1,
        repetition_context_size=30,
        presence_penalty=-1,
        presence_context_size=31,
        frequency_penalty=2,
        frequency_context_size=32,
        logit_bias={"5": -100, "7": 1.5},
        seed=11,
    ).sampling
    assert sampling.temperature == 0.5
    assert sampling.top_p == 0.9
    assert sampling.top_k == 40
    assert sampling.min_p == 0.1
    assert (sampling.xtc_probability, sampling.xtc_threshold) == (0.2, 0.3)
    assert (sampling.repetition_penalty, sampling.repetition_window) == (1.1, 30)
    assert (sampling.presence_penalty, sampling.presence_window) == (-1, 31)
    assert (sampling.frequency_penalty, sampling.frequency_window) == (2, 32)
    assert sampling.logit_bias == ((5, -100.0), (7, 1.5))
    assert sampling.seed == 11
    sampling.check(vocab_size=100)


def test_defaults_are_openais_unless_set():
    sampling = chat().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    settings = ServerSettings(default_temperature=0.6, default_top_p=0.95, default_top_k=20, request_timeout_s=9)
    generation = chat(settings, top_k=5)
    assert (generation.sampling.temperature, generation.sampling.top_p, generation.sampling.top_k) == (0.6, 0.95, 5)
    assert generation.timeout_s == 9
    assert chat(settings, timeout=3).timeout_s == 3


def test_seeds():
    assert chat().sampling.seed is None
    assert chat(seed=-1).sampling.seed is None
    assert chat(seed=-5).sampling.seed == chat(seed=-5).sampling.seed >= 0
    assert chat(seed=0).sampling.seed == 0
    assert refusal(chat, seed=2**70).param == "seed"


def test_other_servers_words_for_no_limit():
    assert chat(max_tokens=-1).max_tokens is None
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(top_p=0).sampling.greedy


def test_max_completion_tokens_wins():
    assert chat(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert chat(max_tokens=5).max_tokens == 5
    assert chat().max_tokens is None
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"


def test_stops():
    assert chat(stop="END").stop == ("END",)
    assert chat(stop=["a", "b", "a", ""]).stop == ("a", "b")
    assert chat(stop="").stop == ()
    assert chat(stop_token_ids=[1, 2.0]).stop_token_ids == (1, 2)
    assert refusal(chat, stop=[str(number) for number in range(17)]).param == "stop"
    assert refusal(chat, stop="x" * 1025).param == "stop"
    assert refusal(chat, stop_token_ids=[-1]).param == "stop_token_ids"
    assert refusal(chat, stop_token_ids=[1] * 257).param == "stop_token_ids"


def test_other_extensions():
    generation = chat(ignore_eos=True, min_tokens=3, max_tokens=4, timeout=2.5, priority=-2, cache=False)
    assert generation.ignore_eos
    assert generation.min_tokens == 3
    assert generation.timeout_s == 2.5
    assert generation.priority == -2
    assert generation.cache is False
    assert chat().cache is True
    assert refusal(chat, min_tokens=5, max_tokens=4).param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [-0.1, 2.1],
        "top_p": [-0.1, 1.1],
        "top_k": [-2, 2**31, 1.5],
        "min_p": [-0.1, 1.1],
        "xtc_probability": [1.1],
        "xtc_threshold": [0.6],
        "repetition_penalty": [0, -1, 101],
        "repetition_context_size": [0, 5000],
        "presence_penalty": [-2.1, 2.1],
        "presence_context_size": [0],
        "frequency_penalty": [-2.1, 2.1],
        "frequency_context_size": [-1],
        "n": [0, 9, 10**30],
        "max_tokens": [0, -2, 2**31],
        "min_tokens": [-1],
        "timeout": [0, -1, 1e9],
        "priority": [-1001, 1001],
        "logit_bias": [{"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"²": 1}, {"1": 101}, {"9" * 400: 1}],
    }.items(),
)
@pytest.mark.parametrize("call", [chat, completion])
def test_out_of_range(call, field, values):
    for value in values:
        assert refusal(call, **{field: value}).param == field


def test_logit_bias_count():
    assert refusal(chat, logit_bias={str(token): 1 for token in range(1025)}).param == "logit_bias"


def test_logprobs():
    assert chat(logprobs=True).sampling.top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.top_logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).sampling.top_logprobs is None
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert completion(logprobs=0)[0].sampling.top_logprobs == 0
    assert completion(logprobs=5)[0].sampling.top_logprobs == 5
    assert completion(logprobs=False)[0].sampling.top_logprobs is None
    assert refusal(completion, logprobs=6).param == "logprobs"
    assert refusal(completion, logprobs=True).param == "logprobs"


def test_messages():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "annotations": []},
        {"role": "assistant", "content": "x", "tool_calls": [], "reasoning_content": "hm"},
    ]
    assert chat(messages=messages).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
    )


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "tool", "content": "1"}, "tool_call_id", "missing_parameter"),
        ({"role": "user", "content": "1", "tool_call_id": "c"}, "tool_call_id", "invalid_value"),
        ({"role": "function", "content": "1"}, "role", "unsupported_parameter"),
        ({"role": "wizard", "content": "1"}, "role", "invalid_value"),
        ({"content": "1"}, "role", "invalid_value"),
        ({"role": "user"}, "content", "missing_parameter"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0].type", None),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0].type", "unsupported_parameter"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "missing_parameter"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0].function.name", "missing_parameter"),
        ({"role": "user", "content": "1", "tool_calls": [{"id": "1"}]}, "tool_calls", "invalid_value"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
        ({"role": "assistant", "audio": {"id": "1"}}, "audio", "unsupported_parameter"),
    ],
)
def test_messages_that_cannot_be_served(message, param, code):
    error = refusal(chat, messages=[*MESSAGES, message])
    assert error.param == f"messages[1].{param}"
    assert code is None or error.code == code


@pytest.mark.parametrize("messages", [[], None])
def test_no_messages(messages):
    assert refusal(chat, messages=messages).param == "messages"


def test_template_arguments():
    generation = chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert generation.template_args == {"enable_thinking": False, "reasoning_effort": "low"}
    error = refusal(chat, chat_template_kwargs={"messages": []})
    assert error.param == "chat_template_kwargs.messages"
    assert error.code == "unsupported_parameter"
    assert refusal(chat, chat_template_kwargs={"enable_thinking": {}}).code == "invalid_type"
    assert refusal(chat, chat_template_kwargs={"thinking": "x" * 1000}).param == "chat_template_kwargs.thinking"
    assert refusal(lambda: chat(ServerSettings(template_args=()), reasoning_effort="low")).param == "reasoning_effort"


def test_continuing_the_last_message():
    messages = [*MESSAGES, {"role": "assistant", "content": "Sure"}]
    assert chat(messages=messages, continue_final_message=True, add_generation_prompt=False).continue_final_message
    assert not chat(messages=messages, add_generation_prompt=True).continue_final_message
    assert refusal(chat, continue_final_message=True).param == "continue_final_message"
    assert refusal(chat, add_generation_prompt=False).param == "add_generation_prompt"


def test_prompts():
    assert [generation.prompt for generation in completion(prompt=["a", "b"])] == ["a", "b"]
    assert [generation.tokens for generation in completion(prompt=[[1], [2, 3]])] == [(1,), (2, 3)]
    mixed = completion(prompt=["a", [1]])
    assert (mixed[0].prompt, mixed[1].tokens) == ("a", (1,))
    for prompt in (None, [], [[]], ["a", 1], [1.5], [-1]):
        assert refusal(completion, prompt=prompt).param == "prompt"


def test_best_of():
    assert completion(n=2, best_of=2)[0].n == 2
    assert refusal(completion, n=2, best_of=3).param == "best_of"


@pytest.mark.parametrize("call", [chat, completion])
@pytest.mark.parametrize("name", RefusedFields.__struct_fields__)
def test_fields_that_cannot_be_honoured(call, name):
    error = refusal(call, **{name: {"some": "thing"}})
    assert error.param == name
    assert error.code == "unsupported_parameter"
    for harmless in (None, *HARMLESS.get(name, ())):
        assert call(**{name: harmless})


def test_true_is_not_one():
    assert refusal(chat, typical_p=True).param == "typical_p"
    assert refusal(chat, store=1).param == "store"


def test_harmless_values_are_of_known_fields():
    assert set(HARMLESS) <= set(RefusedFields.__struct_fields__)
