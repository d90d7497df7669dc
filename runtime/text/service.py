"""The door to all text handling of one engine: texts to tokens on threads, tokens to text on the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .chat import ChatOptions, count_chars
from .dialect import read_dialect
from .stream import TextStream
from .token_decoders import PieceDecoder, WindowDecoder
from .tokenizer_copy import TokenizerCopy
from .vocabulary import read_vocabulary
from .worker_pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..tracing import Tracer
    from .dialect import ToolFormat
    from .token_decoders import TokenDecoder
    from .tokenizer_types import Message, Wrapper

MAX_QUEUED_TEXTS = 1024
# About 15 ms of work; longer texts leave one thread to the others.
LONG_TEXT_CHARS = 64 * 1024


class TextService:
    """Tokenises, renders and decodes off the event loop, and opens the streams that detokenise on it.

    The coroutines and `open_stream` belong to the event loop's thread.

    Attributes:
        vocab_size: ids in and out lie below it.
        eos_token_ids: ids that end a generation, those of the tokenizer and its generation config.
        dialect: how the model writes thoughts and tool calls.
        special_token_ids: ids left out of text, as `decode(skip_special_tokens=True)` does.
    """

    def __init__(
        self,
        load: Callable[[], Wrapper],
        *,
        threads: int = 2,
        vocab_size: int,
        max_queued: int = MAX_QUEUED_TEXTS,
        tool_format: ToolFormat | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Load a tokenizer for each thread, and one for the loop where its streams need one; takes seconds.

        Args:
            load: gives a fresh mlx-lm TokenizerWrapper that shares nothing with the last one.
            threads: worker threads.
            vocab_size: rows of the model's output.
            max_queued: texts that may wait for a thread.
            tool_format: how tool calls are written; None asks the tokenizer.
            tracer: records the threads' jobs, if there is one.

        Raises:
            Exception: whatever `load` raises; no thread is left then.
        """
        wrapper = load()
        vocabulary = read_vocabulary(wrapper, vocab_size)
        self.vocab_size = vocab_size
        self.eos_token_ids = vocabulary.eos_tokens
        self.special_token_ids = vocabulary.special_tokens
        self.dialect = read_dialect(wrapper, vocabulary.special_tokens, tool_format)
        self._pieces = vocabulary.pieces
        self._strips_space = vocabulary.strips_space
        self._token_texts: dict[int, tuple[str, bytes]] = {}
        self._default_skip = vocabulary.special_tokens | vocabulary.eos_tokens
        spare = [wrapper] if vocabulary.pieces is not None else []
        if not spare:
            self._loop_copy = TokenizerCopy(wrapper, vocab_size)
            self._context = wrapper.encode("a", add_special_tokens=False)
        self._pool = WorkerPool(
            lambda: TokenizerCopy(spare.pop() if spare else load(), vocab_size),
            threads=threads,
            max_queued=max_queued,
            name="text",
            tracer=tracer,
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Raises:
            InvalidRequest: (`prompt`) half a surrogate pair, or a token the model has no row for.
            Overloaded: too many texts wait; NotReady when the service is closed.
        """
        return await self._pool.run(
            lambda copy: copy.encode(text, add_special_tokens=add_special_tokens),
            long=len(text) > LONG_TEXT_CHARS,
        )

    async def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_args: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template.

        Args:
            messages: role and content (a string, a list of text parts, or None), and more if the template
                knows it.
            add_generation_prompt: end with the header of an assistant's turn.
            continue_final_message: leave the last message open instead; wins over `add_generation_prompt`.
            tools: JSON schemas of the tools the model may call.
            template_args: more variables for the template, such as `enable_thinking`.

        Raises:
            InvalidRequest: (`messages`) no template, it refuses the messages, or as `encode` does;
                (`chat_template_kwargs`) a template argument with a reserved name.
            Overloaded: too many texts wait; NotReady when the service is closed.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_args=template_args or {},
        )
        options.check()
        return await self._pool.run(
            lambda copy: copy.render_chat(messages, options), long=count_chars(messages) > LONG_TEXT_CHARS
        )

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `tokens` as a text of its own (a first space may be dropped, by the tokenizer's rule).

        Raises:
            InvalidRequest: (`tokens`) an id outside the vocabulary.
            Overloaded: too many texts wait; NotReady when the service is closed.
        """
        return await self._pool.run(
            lambda copy: copy.decode(tokens, skip_special_tokens=skip_special_tokens),
            long=len(tokens) > LONG_TEXT_CHARS // 4,
        )

    def open_stream(
        self, *, stop: Sequence[str] = (), skip: frozenset[int] | None = None, text_start: bool = False
    ) -> TextStream:
        """A new stream for one request's output.

        Args:
            stop: stop strings; none to 16, of 1..512 characters.
            skip: ids without text; by default all special tokens. Those that end a generation never have any.
            text_start: True for chat: the output is a text of its own, as `tokenizer.decode` takes it, and
                SentencePiece tokenizers drop its first space. False for completions: the output goes on from
                the prompt and keeps its space. Byte-level tokenizers never drop one.

        Raises:
            InvalidRequest: (`stop`) too many stop strings, an empty or an overlong one.
        """
        skipped = self._default_skip if skip is None else skip | self.eos_token_ids
        return TextStream(self._open_decoder(text_start=text_start), stop=stop, skip=skipped)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token's text and exact bytes; special tokens have theirs, half a character has U+FFFD as text.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        known = self._token_texts.get(token)
        if known is None:
            known = self._token_texts[token] = self._read_token(token)
        return known

    def token_bytes(self) -> list[bytes] | None:
        """Every id's exact bytes, b"" for ids without text; None when this tokenizer's tokens have none alone."""
        if self._pieces is None:
            return None
        return [piece.encode() if isinstance(piece, str) else piece for piece in self._pieces]

    def close(self) -> None:
        """Fail waiting calls with NotReady and join the threads: waits for what runs, a second at most."""
        self._pool.close()

    def _open_decoder(self, *, text_start: bool) -> TokenDecoder:
        if self._pieces is not None:
            return PieceDecoder(self._pieces, strip_space=self._strips_space and text_start)
        return WindowDecoder(self._loop_copy.decode_window, [] if text_start else self._context)

    def _read_token(self, token: int) -> tuple[str, bytes]:
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        if self._pieces is not None and isinstance(piece := self._pieces[token], bytes):
            return piece.decode("utf-8", "replace"), piece
        decoder = self._open_decoder(text_start=False)
        text = decoder.add(token) + decoder.finish()
        return text, text.encode()
