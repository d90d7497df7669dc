"""The parts of mlx-lm's TokenizerWrapper, transformers and tokenizers that this package uses.

Only their shapes: neither mlx-lm nor MLX is imported here, the wrapper comes ready-made from the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

Message: TypeAlias = "Mapping[str, object]"


class Encoding(Protocol):
    """One encoded text."""

    @property
    def ids(self) -> list[int]:
        """The token ids; a new list each time."""
        ...


class AddedToken(Protocol):
    """A token matched before the model's own."""

    special: bool


class DecoderState(Protocol):
    """The last stage of decoding, as a Rust object."""

    def __getstate__(self) -> bytes:
        """Its description in JSON."""
        ...


class RustTokenizer(Protocol):
    """`tokenizers.Tokenizer`. Its batch methods release the interpreter lock, the single ones do not."""

    encode_special_tokens: bool

    @property
    def decoder(self) -> DecoderState | None:
        """How tokens become text."""
        ...

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        """Encode without offsets."""
        ...

    def decode_batch(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        """Decode."""
        ...

    def id_to_token(self, token: int) -> str | None:
        """The token as it stands in the vocabulary."""
        ...

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by id."""
        ...

    def no_truncation(self) -> None:
        """Undo the file's truncation."""
        ...

    def no_padding(self) -> None:
        """Undo the file's padding."""
        ...


class Wrapper(Protocol):
    """mlx-lm's TokenizerWrapper around a transformers tokenizer."""

    has_chat_template: bool

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Ids that end a generation."""
        ...

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids of the named special tokens."""
        ...

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Text of `tokens`."""
        ...

    def apply_chat_template(self, messages: Sequence[Message], *, tokenize: bool, **options: object) -> str | list[int]:
        """The prompt of a conversation."""
        ...


# What a class below transformers' own base replaces when it encodes or decodes in a way of its own.
ENCODE_METHODS = ("__call__", "encode", "_encode_plus")
DECODE_METHODS = ("decode", "_decode")


def rust_tokenizer(wrapper: Wrapper, methods: Sequence[str]) -> RustTokenizer | None:
    """The Rust tokenizer below `wrapper`, unless a class of a model replaces one of `methods`."""
    tokenizer = getattr(wrapper, "_tokenizer", wrapper)
    backend: RustTokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast") or any(replaces(tokenizer, name) for name in methods):
        return None
    return backend


def replaces(tokenizer: object, method: str) -> bool:
    """True when the class that gives `method` is not one of transformers' common bases."""
    for owner in type(tokenizer).__mro__:
        if method in vars(owner):
            return not owner.__module__.startswith("transformers.tokenization_utils_")
    return False
