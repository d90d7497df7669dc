"""One thread's own tokenizer, called so that the interpreter lock is free while Rust works.

`tokenizers` releases the lock in its batch methods only: encoding 1 MB holds it for some 450 ms through
`encode`, for under 15 ms through `encode_batch_fast`, which also skips offsets that nobody reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidRequest
from ..sampling_params import check_token_ids
from .chat import render
from .tokenizer_types import DECODE_METHODS, ENCODE_METHODS, rust_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .chat import ChatOptions
    from .tokenizer_types import Message, Wrapper


class TokenizerCopy:
    """Encodes, renders and decodes. Belongs to one thread."""

    def __init__(self, wrapper: Wrapper, vocab_size: int) -> None:
        """Take `wrapper` over.

        Args:
            wrapper: used by this thread alone from now on.
            vocab_size: ids of prompts must lie below it.
        """
        self._wrapper = wrapper
        self._vocab_size = vocab_size
        self._encoder = rust_tokenizer(wrapper, ENCODE_METHODS)
        self._decoder = rust_tokenizer(wrapper, DECODE_METHODS)
        self._outgrows_model = len(wrapper) > vocab_size
        if self._encoder is not None:  # as transformers sets it before each call
            self._encoder.no_truncation()
            self._encoder.no_padding()
            self._encoder.encode_special_tokens = bool(getattr(wrapper, "split_special_tokens", False))

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of `text`.

        Raises:
            InvalidRequest: naming `param`: half a surrogate pair, or a token the model has no row for.
        """
        if not _is_unicode(text):
            raise InvalidRequest("the text holds half of a surrogate pair", param=param)
        if self._encoder is not None:
            tokens = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            tokens = self._wrapper.encode(text, add_special_tokens=add_special_tokens)
        return self._checked(tokens, param)

    def render_chat(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        """Token ids of a conversation; the template writes its own special tokens.

        Raises:
            InvalidRequest: no template, or it refuses the messages, or as `encode` does.
        """
        prompt = render(self._wrapper, messages, options)
        if isinstance(prompt, str):
            return self.encode(prompt, add_special_tokens=False, param="messages")
        return self._checked(list(prompt), "messages")

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `tokens` as a text of its own, as the tokenizer decodes it.

        Raises:
            InvalidRequest: an id outside the vocabulary.
        """
        check_token_ids(tokens, self._vocab_size, "tokens")
        return self.decode_window(list(tokens), skip_special_tokens=skip_special_tokens)

    def decode_window(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Like `decode`, for ids known to be good."""
        if self._decoder is not None:
            return self._decoder.decode_batch([tokens], skip_special_tokens=skip_special_tokens)[0]
        return self._wrapper.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def _checked(self, tokens: list[int], param: str) -> list[int]:
        if self._outgrows_model:
            check_token_ids(tokens, self._vocab_size, param)
        return tokens


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
