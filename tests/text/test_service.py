"""The service: right ids from many callers at once, and a loop that keeps ticking."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from mlx_troupe.runtime.errors import InvalidRequest, NotReady

from . import made_tokenizers
from .conftest import opened
from .made_tokenizers import CORPUS

BYTE_LEVEL = made_tokenizers.byte_level()


def text_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("text-")}


async def test_encode_and_decode_equal_the_tokenizer(byte_level_service, sentencepiece_service, metaspace_service):
    for service, wrapper in (
        (byte_level_service, BYTE_LEVEL),
        (sentencepiece_service, made_tokenizers.sentencepiece()),
        (metaspace_service, made_tokenizers.metaspace()),
    ):
        for text in (*CORPUS, ""):
            for special in (True, False):
                tokens = await service.encode(text, add_special_tokens=special)
                assert tokens == wrapper.encode(text, add_special_tokens=special)
            assert await service.decode(tokens) == wrapper.decode(tokens, skip_special_tokens=True)


async def test_200_encodes_at_once_and_no_thread_after_close():
    before = text_threads()
    with opened(made_tokenizers.byte_level, threads=2) as service:
        texts = [f"{index} {CORPUS[index % 3]}" * 5 for index in range(200)]
        groups = [asyncio.gather(*(service.encode(text) for text in texts[start::4])) for start in range(4)]
        results = await asyncio.gather(*groups)
        for start, group in enumerate(results):
            assert group == [BYTE_LEVEL.encode(text) for text in texts[start::4]]
        assert len(text_threads() - before) == 2
    assert text_threads() == before
    with pytest.raises(NotReady):
        await service.encode("late")


async def test_cancelled_encodes_leave_the_service_usable():
    with opened(made_tokenizers.byte_level, threads=2) as service:
        tasks = [asyncio.create_task(service.encode(CORPUS[0] * 400)) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        assert await service.encode(CORPUS[1]) == BYTE_LEVEL.encode(CORPUS[1])


async def test_one_tokenizer_for_each_thread_and_one_for_the_loop_if_it_needs_one():
    for make, loads in ((made_tokenizers.byte_level, 3), (made_tokenizers.metaspace, 4)):
        made = []

        def load(make=make, made=made):
            made.append(threading.current_thread())
            return make()

        with opened(load, threads=3, vocab_size=10**4):
            assert len(made) == loads
            assert len(set(made)) == loads


async def test_tokens_the_model_has_no_row_for_are_refused():
    with opened(made_tokenizers.byte_level, vocab_size=100) as service:
        with pytest.raises(InvalidRequest) as caught:
            await service.encode("日本語 and more")
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequest):
            await service.render_chat([{"role": "user", "content": "日本語"}])


@pytest.mark.parametrize("tokens", [[-1], [10**6], [2**40]])
async def test_decode_checks_its_ids(byte_level_service, tokens):
    with pytest.raises(InvalidRequest):
        await byte_level_service.decode(tokens)


async def test_half_a_surrogate_pair_is_refused(byte_level_service):
    with pytest.raises(InvalidRequest) as caught:
        await byte_level_service.encode("a\ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest) as caught:
        await byte_level_service.render_chat([{"role": "user", "content": "\ud83d"}])
    assert caught.value.param == "messages"


async def test_truncation_and_padding_of_the_file_do_not_apply():
    def load():
        wrapper = made_tokenizers.byte_level()
        wrapper.backend_tokenizer.enable_truncation(4)
        wrapper.backend_tokenizer.enable_padding(length=4)
        return wrapper

    with opened(load, threads=1) as service:
        assert await service.encode(CORPUS[0]) == BYTE_LEVEL.encode(CORPUS[0])
        assert await service.encode("") == []


async def test_a_class_with_an_encoding_of_its_own_is_respected():
    from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper
    from tokenizers import Tokenizer

    def load():
        raw = Tokenizer.from_str(made_tokenizers.byte_level_json())
        raw.add_tokens(["<n>"])
        return TokenizerWrapper(NewlineTokenizer(tokenizer_object=raw, eos_token="<|im_end|>"))

    with opened(load, threads=1) as service:
        text = "one\ntwo\nthree"
        tokens = await service.encode(text)
        assert tokens == load().encode(text) != BYTE_LEVEL.encode(text)
        assert await service.decode(tokens) == text
        stream = service.open_stream(text_start=True)
        assert "".join([*map(stream.add, tokens), stream.finish()]) == text


def test_facts(byte_level_service):
    assert byte_level_service.eos_token_ids == {1}
    assert byte_level_service.special_token_ids == {0, 1, BYTE_LEVEL.convert_tokens_to_ids("<s日>")}
    assert byte_level_service.vocab_size == len(BYTE_LEVEL)


def test_a_tokenizer_that_cannot_be_loaded():
    def load():
        raise FileNotFoundError("no tokenizer here")

    with pytest.raises(FileNotFoundError):
        opened(load, vocab_size=10).__enter__()


async def longest_gap_s(work) -> float:
    """The longest time the loop did not get to run while `work` was awaited."""
    task, longest, last = asyncio.ensure_future(asyncio.wait_for(work, 60)), 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert len(await task) > 100_000
    return longest


async def test_a_prompt_of_1_mb_does_not_stall_the_loop():
    text = " ".join(CORPUS) * (10**6 // len(" ".join(CORPUS).encode()))
    with opened(made_tokenizers.byte_level, threads=2) as service:
        works = (
            lambda: service.encode(text),
            lambda: service.render_chat([{"role": "user", "content": text}]),
        )
        for work in works:
            # Other processes may widen one gap, holding the interpreter lock (some 400 ms here) widens all of them.
            gaps = []
            while len(gaps) < 5 and min(gaps, default=1) >= 0.05:
                gaps.append(await longest_gap_s(work()))
            assert min(gaps) < 0.05, gaps
