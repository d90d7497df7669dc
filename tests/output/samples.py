"""One dialect for each of mlx-lm's parsers, and what a model of that kind writes for two parallel calls."""

import importlib

from mlx_troupe.runtime.text.dialect import Dialect

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"type": "object", "properties": {"why": {"type": "string"}}}},
    },
)
CALLS = [("get_weather", {"city": "Zürich", "days": 3}), ("stop", {"why": "done"})]

WRITTEN = {
    "json_tools": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {"why": "done"}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n<parameter=why>\ndone\n</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "glm47": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>stop<arg_key>why</arg_key><arg_value>done</arg_value></tool_call>"
    ),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Zürich<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:stop{why:<|"|>done<|"|>}<tool_call|>'
    ),
    "function_gemma": (
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3}<end_function_call>"
        "<start_function_call>call:stop{why:<escape>done<escape>}<end_function_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Zürich", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.stop:1'
        '<|tool_call_argument_begin|>{"why": "done"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>Zürich<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3'
        '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="stop" index="2"<|sep|><|open|>argument '
        'key="why" type="string"<|sep|>done<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    ),
    "longcat": (
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Zürich"
        "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n"
        "</longcat_tool_call><longcat_tool_call>stop\n<longcat_arg_key>why</longcat_arg_key>\n<longcat_arg_value>done"
        "</longcat_arg_value>\n</longcat_tool_call>"
    ),
    "minicpm5": (
        '<function name="get_weather"><param name="city">Zürich</param><param name="days">3</param></function>'
        '<function name="stop"><param name="why">done</param></function>'
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="stop">\n<parameter name="why">done'
        "</parameter>\n</invoke>\n</minimax:tool_call>"
    ),
    "mistral": ('[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 3}[TOOL_CALLS]stop[ARGS]{"why": "done"}'),
    "muse_spark": (
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Zürich</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n<atem:invoke name="stop">\n'
        '<atem:parameter name="why">done</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    ),
    "pythonic": '<|tool_call_start|>[get_weather(city="Zürich", days=3), stop(why="done")]<|tool_call_end|>',
}
WRITTEN["laguna"] = WRITTEN["glm47"]


def dialect(parser: str, *, thinks: bool = True) -> Dialect:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    marks = {"think_start": "<think>", "think_end": "</think>"} if thinks else {}
    tokens = {"think_start_tokens": (1,), "think_end_tokens": (2,)} if thinks else {}
    return Dialect(
        parser=parser,
        call_start=module.tool_call_start,
        call_end=module.tool_call_end,
        parse_call=module.parse_tool_call,
        **marks,
        **tokens,
    )
