"""Text that is hard to stream, over HTTP: whole and streamed answers agree byte for byte, and end once.

The model gives one byte a token, so that every character, stop string and mark is cut at every byte.
"""

import asyncio

import pytest

from tests.output.samples import CALLS, TOOLS, WRITTEN

from .scripted import scripted

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TEXTS = [
    "naïve café, ελληνικά, русский, 日本語のテキスト",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇫🇷 👍🏽 e\u0301 \u200d\ufe0f",
    " \n\t  \n\n \r\n ",
    "\n",
    " a  b \n\n\n c\t",
    '\u2028\u2029\x85\x00\x1f"\\/\x7f\ufffe\ufeff',
    'data: {"a": 1}\n\ndata: [DONE]\n\n: comment\n\nevent: x\n',
    "\U0001d573\U0001d58a\U0001d591 \U00010348 \U0010ffff",
    "",
]
BROKEN = [b"\xff", b"a\x80b", b"\xe6\x97", b"\xf0\x9f\x98", b"\xc3\x28 \xed\xa0\x80 ok", b"\xf0\x9fa\xf0\x9f\x98\x80"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_text_comes_out_as_it_is(path, monkeypatch):
    async with scripted(monkeypatch) as stage:

        async def one(data: bytes) -> None:
            wanted = data.decode("utf-8", "replace")
            body = {"seed": stage.script(data), "max_tokens": 500} | (HI if path == CHAT else {"prompt": "p"})
            whole, streamed = await stage.both(path, body)
            choice = whole["choices"][0]
            found = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert (found, streamed.text) == (wanted, wanted)
            assert choice["finish_reason"] == streamed.reason == "stop"
            assert whole["usage"]["completion_tokens"] == len(data) + 1

        await asyncio.gather(*(one(text.encode()) for text in TEXTS), *(one(data) for data in BROKEN))


async def test_blank_deltas_are_kept_as_they_come(monkeypatch):
    """Each blank is a delta of its own; none waits for, or is lost before, what follows."""
    async with scripted(monkeypatch) as stage:
        _, streamed = await stage.both(CHAT, HI | {"seed": stage.script(" \n\n  a \n"), "max_tokens": 50})
    assert streamed.deltas == [" ", "\n", "\n", " ", " ", "a", " ", "\n"]


async def test_every_length_cuts_the_same_whole_and_streamed(monkeypatch):
    """`max_tokens` inside a character: U+FFFD for it, and "length", both ways."""
    text = "日本 👩‍👩‍👧 ü"
    async with scripted(monkeypatch) as stage:
        seed = stage.script(text)

        async def one(count: int) -> None:
            whole, streamed = await stage.both(COMPLETIONS, {"prompt": "p", "seed": seed, "max_tokens": count})
            wanted = text.encode()[:count].decode("utf-8", "replace")
            assert whole["choices"][0]["text"] == streamed.text
            assert streamed.text.rstrip("\ufffd") == wanted.rstrip("\ufffd")
            assert whole["choices"][0]["finish_reason"] == streamed.reason == "length"

        await asyncio.gather(*(one(count) for count in range(1, len(text.encode()) + 1)))


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; the longest one, if several are."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("Hello, wörld! STOP and more", ["STOP"]),
        ("aab aaab aaaab", ["aaab", "aaaab"]),
        ("ünïcödé 日本 語 end", ["本 語", "語"]),
        ("👩‍👩‍👧 and 👩‍👦", ["👩‍👦", "👩‍👩‍👦"]),
        ("line\n\nUser: no", ["\nUser:", "\n\n\n"]),
        ("ababab abc", ["abc", "babc"]),
        ("almost STO", ["STOP"]),
        ("STOP", ["STOP"]),
        ("x\u2028y", ["\u2028"]),
        (" \n ", ["\n "]),
    ],
)
async def test_stop_strings_cut_at_every_byte(text, stops, monkeypatch):
    wanted, stopped = cut(text, stops)
    async with scripted(monkeypatch) as stage:
        for path, body in ((COMPLETIONS, {"prompt": "p"}), (CHAT, HI)):
            asked = body | {"seed": stage.script(text), "stop": stops, "max_tokens": 200}
            whole, streamed = await stage.both(path, asked)
            choice = whole["choices"][0]
            found = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert (found, streamed.text) == (wanted, wanted)
            assert choice["finish_reason"] == streamed.reason == "stop"
            if stopped:
                assert whole["usage"]["completion_tokens"] <= len(text.encode())


async def test_a_stop_string_at_every_place(monkeypatch):
    """Every part of a text as its own stop string."""
    text = "aé日😀 b\n"
    async with scripted(monkeypatch) as stage:
        seed = stage.script(text)

        async def one(low: int, high: int) -> None:
            stop = text[low:high]
            asked = {"prompt": "p", "seed": seed, "stop": stop, "max_tokens": 200}
            whole, streamed = await stage.both(COMPLETIONS, asked)
            wanted, _ = cut(text, [stop])
            assert whole["choices"][0]["text"] == streamed.text == wanted
            assert streamed.reason == "stop"

        pairs = [(low, high) for low in range(len(text)) for high in range(low + 1, len(text) + 1)]
        await asyncio.gather(*(one(low, high) for low, high in pairs))


# --- thoughts and calls -----------------------------------------------------------------------------------------------

THOUGHT = "<think>\nüberlegen 🤔\n</think>\n\n"
OFFER = HI | {"tools": TOOLS, "max_tokens": 3000}


def message_of(whole):
    choice = whole["choices"][0]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    return message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"]


@pytest.mark.parametrize("parser", sorted(WRITTEN))
async def test_marks_cut_at_every_byte(parser, monkeypatch):
    """A thought, prose with half marks, two calls: the same whole and streamed, and nothing of the marks in it."""
    prose = "I look < here <th [TOOL <|too {1} now."
    async with scripted(monkeypatch, parser, thinks=True) as stage:
        seed = stage.script(THOUGHT + prose + " " + WRITTEN[parser])
        whole, streamed = await stage.both(CHAT, OFFER | {"seed": seed})
        content, thought, calls, reason = message_of(whole)
        assert (content, thought, reason) == (prose, "überlegen 🤔", "tool_calls")
        assert [name for name, _ in calls] == [name for name, _ in CALLS]
        assert (streamed.text, streamed.thought, streamed.calls, streamed.reason) == (content, thought, calls, reason)


@pytest.mark.parametrize("parser", sorted(WRITTEN))
async def test_calls_cut_anywhere_are_text(parser, monkeypatch):
    """Ended by the end token or by length inside the first call: its text, no call, and the reason that is true."""
    written = WRITTEN[parser]
    first = written.encode()[: len(written.encode()) // 2 - 12]
    async with scripted(monkeypatch, parser) as stage:

        async def one(count: int, limit: int) -> None:
            seed = stage.script(first[:count])
            whole, streamed = await stage.both(CHAT, OFFER | {"seed": seed, "max_tokens": limit})
            content, _, calls, reason = message_of(whole)
            assert calls == []
            assert reason == streamed.reason == ("length" if limit == count else "stop")
            assert content == streamed.text
            assert content.strip() == first[:count].decode("utf-8", "replace").strip()

        counts = range(1, len(first) - 30, 5)
        work = [one(count, limit) for count in counts for limit in (count, 3000)]
        await asyncio.gather(*work)


async def test_a_named_call_that_is_cut_is_text_as_well(monkeypatch):
    async with scripted(monkeypatch, "json_tools") as stage:
        choice = {"type": "function", "function": {"name": "stop"}}
        seed = stage.script('{"why": "because')
        whole, streamed = await stage.both(CHAT, OFFER | {"seed": seed, "tool_choice": choice, "max_tokens": 12})
    content, _, calls, reason = message_of(whole)
    assert (content, calls, reason) == ('{"why": "bec', [], "length")
    assert (streamed.text, streamed.reason) == (content, reason)


async def test_many_choices_end_once_each(monkeypatch):
    async with scripted(monkeypatch) as stage:
        seed = stage.script("one 日")
        for place in range(1, 8):
            stage.engine.scripts[seed + place] = stage.engine.scripts[seed][:place]
        async with stage._session.post(
            stage.url + COMPLETIONS, json={"prompt": "p", "n": 8, "seed": seed, "max_tokens": 50, "stream": True}
        ) as response:
            data = (await response.read()).decode()
    assert data.count('"finish_reason":"stop"') == 8
    assert data.count("[DONE]") == 1
