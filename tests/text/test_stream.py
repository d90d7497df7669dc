"""Streams: the joined deltas are the tokenizer's own text, and no delta ends inside a character."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_troupe.runtime.errors import InvalidRequest

from . import made_tokenizers
from .made_tokenizers import CORPUS

SEEDS = st.lists(st.integers(0, 10**6), max_size=40)
TEXTS = st.text(st.sampled_from("ab cdé日本語😀\n  ,.ЖΩ\u200d"), max_size=60) | st.sampled_from(CORPUS)


def streamed(stream, tokens) -> list[str]:
    """What a stream gives for `tokens`, one delta a token and the rest at the end."""
    return [*(stream.add(token) for token in tokens), stream.finish()]


def encoded(wrapper, text) -> list[int]:
    return wrapper.encode(text, add_special_tokens=False)


def whole_bytes(wrapper, tokens) -> bytes:
    """The bytes of SentencePiece tokens, without the space rule of a text's start."""
    parts = []
    for name in wrapper.convert_ids_to_tokens([token for token in tokens if token > 2]):
        byte = re.fullmatch("<0x([0-9A-F]{2})>", name)
        parts.append(bytes.fromhex(byte[1]) if byte else name.replace("▁", " ").encode())
    return b"".join(parts)


BYTE_LEVEL = made_tokenizers.byte_level()
SENTENCEPIECE = made_tokenizers.sentencepiece()
METASPACE = made_tokenizers.metaspace()
ODD = made_tokenizers.odd()


@given(SEEDS, st.booleans())
def test_byte_level_equals_decode_for_any_tokens(byte_level_service, seeds, text_start):
    tokens = [seed % byte_level_service.vocab_size for seed in seeds]
    deltas = streamed(byte_level_service.open_stream(text_start=text_start), tokens)
    assert "".join(deltas) == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


def test_every_byte_level_token_alone_equals_decode(byte_level_service):
    for token in range(byte_level_service.vocab_size):
        text = BYTE_LEVEL.decode([token])
        assert byte_level_service.token_text(token)[0] == text
        shown = "" if token in byte_level_service.special_token_ids else text
        assert "".join(streamed(byte_level_service.open_stream(), [token])) == shown


@given(SEEDS)
def test_sentencepiece_equals_decode_for_any_tokens(sentencepiece_service, seeds):
    tokens = [seed % sentencepiece_service.vocab_size for seed in seeds]
    text = whole_bytes(SENTENCEPIECE, tokens).decode("utf-8", "replace")
    assert "".join(streamed(sentencepiece_service.open_stream(), tokens)) == text
    as_start = "".join(streamed(sentencepiece_service.open_stream(text_start=True), tokens))
    assert as_start == text.removeprefix(" ")
    # Of an invalid run of byte tokens Rust makes one U+FFFD a byte; we keep the characters that are valid.
    decoded = SENTENCEPIECE.decode(tokens, skip_special_tokens=True)
    if "\ufffd" not in decoded:
        assert as_start == decoded


@given(TEXTS, st.data())
def test_no_delta_holds_half_a_character(byte_level_service, sentencepiece_service, odd_service, text, data):
    services = (byte_level_service, sentencepiece_service, odd_service)
    for service, wrapper in zip(services, (BYTE_LEVEL, SENTENCEPIECE, ODD), strict=True):
        tokens = encoded(wrapper, text)
        stream = service.open_stream(text_start=True)
        cut = data.draw(st.integers(0, len(tokens)))
        deltas = [stream.add(token) for token in tokens[:cut]]
        assert "\ufffd" not in "".join(deltas)
        assert text.startswith("".join(deltas))
        if cut == len(tokens):
            assert "".join(deltas) + stream.finish() == text


@given(TEXTS, st.booleans())
def test_window_decoding_equals_decode(metaspace_service, text, text_start):
    tokens = encoded(METASPACE, text)
    deltas = streamed(metaspace_service.open_stream(text_start=text_start), tokens)
    kept = [token for token in tokens if token > 1]  # an unknown character is a special token here
    context = [] if text_start else encoded(METASPACE, "a")
    expected = METASPACE.decode(context + kept)[len(METASPACE.decode(context)) if context else 0 :]
    assert "".join(deltas) == expected


def test_window_decoding_does_not_hold_invalid_bytes_forever(odd_service):
    stream = odd_service.open_stream()
    byte = ODD.convert_tokens_to_ids("<0xFF>")
    deltas = [stream.add(byte) for _ in range(40)]
    assert deltas.count("\ufffd" * 8) == 5
    tokens = encoded(ODD, "then text")
    assert "".join([*map(stream.add, tokens), stream.finish()]) == " then text"


@given(TEXTS)
def test_equals_mlx_lms_own_stream(byte_level_service, sentencepiece_service, text):
    for service, wrapper in ((byte_level_service, BYTE_LEVEL), (sentencepiece_service, SENTENCEPIECE)):
        tokens = encoded(wrapper, text)
        theirs = wrapper.detokenizer
        for token in tokens:
            theirs.add_token(token)
        theirs.finalize()
        ours = "".join(streamed(service.open_stream(text_start=True), tokens))
        assert ours.endswith(theirs.text)
        assert ours.lstrip(" ") == theirs.text.lstrip(" ")  # theirs drops a byte-level text's first spaces


def test_leading_space_of_a_completion_is_kept(
    byte_level_service, sentencepiece_service, gemma_like_service, metaspace_service
):
    for service, wrapper in ((sentencepiece_service, SENTENCEPIECE), (metaspace_service, METASPACE)):
        tokens = encoded(wrapper, "the dog")
        assert "".join(streamed(service.open_stream(), tokens)) == " the dog"
        assert "".join(streamed(service.open_stream(text_start=True), tokens)) == "the dog"
    for service in (byte_level_service, gemma_like_service):
        wrapper = BYTE_LEVEL if service is byte_level_service else made_tokenizers.sentencepiece(strip=False)
        tokens = encoded(wrapper, " the dog")
        for text_start in (False, True):
            assert "".join(streamed(service.open_stream(text_start=text_start), tokens)) == " the dog"


def test_text_start_drops_one_space_only(sentencepiece_service):
    space, two_spaces = SENTENCEPIECE.convert_tokens_to_ids(["▁", "▁▁"])
    for tokens in ([1, space, space], [1, two_spaces]):
        assert "".join(streamed(sentencepiece_service.open_stream(text_start=True), tokens)) == " "


def test_special_tokens_have_no_text(byte_level_service):
    start, end, think = BYTE_LEVEL.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<think>"])
    tokens = [start, *encoded(BYTE_LEVEL, "hi"), think, end]
    assert "".join(streamed(byte_level_service.open_stream(), tokens)) == "hi<think>"
    kept = byte_level_service.open_stream(skip=frozenset())
    assert "".join(streamed(kept, tokens)) == "<|im_start|>hi<think>"  # what ends a generation never has text


def test_special_token_inside_a_character_does_not_break_it(byte_level_service):
    first, *rest = "日".encode()
    of_byte = {byte: token for token in range(byte_level_service.vocab_size)
               for byte in [byte_level_service.token_text(token)[1]] if len(byte) == 1}  # fmt: skip
    tokens = [of_byte[bytes([first])], 1, *(of_byte[bytes([byte])] for byte in rest)]
    assert streamed(byte_level_service.open_stream(), tokens) == ["", "", "", "日", ""]
    assert streamed(byte_level_service.open_stream(), tokens[:3]) == ["", "", "", "\ufffd"]


def test_nul_byte_is_one_character(byte_level_service):
    tokens = encoded(BYTE_LEVEL, "a\0b")
    assert "".join(streamed(byte_level_service.open_stream(), tokens)) == "a\0b"


def test_ids_without_a_token_have_no_text_and_others_are_refused():
    from .conftest import opened

    size = len(BYTE_LEVEL)
    with opened(made_tokenizers.byte_level, vocab_size=size + 7) as service:
        stream = service.open_stream()
        assert stream.add(size + 3) == ""
        for token in (-1, size + 7):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                stream.add(token)
            with pytest.raises(ValueError, match="outside the vocabulary"):
                service.token_text(token)


def test_stop_across_tokens_at_the_start_and_in_multibyte_text(byte_level_service):
    cases = [
        (CORPUS[0], ["own fo"], "the quick br"),
        (CORPUS[0], ["the"], ""),
        (CORPUS[1], ["本語の", "x"], CORPUS[1].partition("本語の")[0]),
        (CORPUS[0], ["never"], CORPUS[0]),
    ]
    for text, stops, expected in cases:
        stream, out = byte_level_service.open_stream(stop=stops), ""
        for token in encoded(BYTE_LEVEL, text):
            out += stream.add(token)
            assert expected.startswith(out)
            if stream.stopped:
                break
        out += stream.finish()
        assert (out, stream.emitted_chars) == (expected, len(expected))
        assert (stream.stopped in stops) == (expected != text)


def test_nothing_may_follow_the_end(byte_level_service):
    tokens = encoded(BYTE_LEVEL, "stop")
    stopped = byte_level_service.open_stream(stop=["s"])
    stopped.add(tokens[0])
    ended = byte_level_service.open_stream()
    ended.finish()
    for stream in (stopped, ended):
        assert stream.finished
        assert stream.finish() == ""
        with pytest.raises(RuntimeError):
            stream.add(tokens[0])


def test_stop_string_completed_at_the_very_end(byte_level_service):
    half = next(t for t in range(byte_level_service.vocab_size) if byte_level_service.token_text(t)[1] == b"\xe6")
    stream = byte_level_service.open_stream(stop=["a\ufffd"])
    tokens = [*encoded(BYTE_LEVEL, "xa"), half]
    assert "".join(stream.add(token) for token in tokens) == "x"
    assert (stream.finish(), stream.stopped) == ("", "a\ufffd")


def test_open_stream_refuses_an_empty_stop_string(byte_level_service):
    with pytest.raises(InvalidRequest) as caught:
        byte_level_service.open_stream(stop=["ok", ""])
    assert caught.value.param == "stop"


@given(st.lists(st.sampled_from(["a", "b", " ", "日", "é", "\n", "😀"]), max_size=30), st.data())
def test_stops_on_tokens_equal_the_cut_text(byte_level_service, sentencepiece_service, parts, data):
    stops = data.draw(st.lists(st.text("ab 日é\n", min_size=1, max_size=3), min_size=1, max_size=4))
    for service, wrapper in ((byte_level_service, BYTE_LEVEL), (sentencepiece_service, SENTENCEPIECE)):
        text = "".join(parts)
        stream, out = service.open_stream(stop=stops, text_start=True), ""
        for token in encoded(wrapper, text):
            if not stream.finished:
                out += stream.add(token)
        out += stream.finish()
        ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
        if ends:
            longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
            assert (out, stream.stopped) == (text[: ends[0] - len(longest)], longest)
        else:
            assert (out, stream.stopped) == (text, None)


def test_token_text_has_exact_bytes(byte_level_service, sentencepiece_service, metaspace_service):
    for service, wrapper in ((byte_level_service, BYTE_LEVEL), (sentencepiece_service, SENTENCEPIECE)):
        tokens = encoded(wrapper, CORPUS[2])
        joined = b"".join(service.token_text(token)[1] for token in tokens)
        assert joined.decode().removeprefix(" ") == CORPUS[2]
    assert byte_level_service.token_text(1) == ("<|im_end|>", b"<|im_end|>")
    partial = sentencepiece_service.token_text(SENTENCEPIECE.convert_tokens_to_ids("<0xE6>"))
    assert partial == ("\ufffd", b"\xe6")
    the = METASPACE.convert_tokens_to_ids("▁the")
    assert metaspace_service.token_text(the) == (" the", b" the")
