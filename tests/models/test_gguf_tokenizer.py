"""Tokenizers out of GGUF metadata: the same ids as the original libraries, and text comes back whole."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, pre_tokenizers

from benchmarks.tiny_tokenizer import tokenizer_json
from mlx_troupe.runtime.models.errors import InvalidModel, UnsupportedModel
from mlx_troupe.runtime.models.gguf_bpe import SPLITTERS
from mlx_troupe.runtime.models.gguf_file import GgufFile
from mlx_troupe.runtime.models.gguf_tokenizer import Vocabulary, write_tokenizer
from mlx_troupe.runtime.models.loader import load_tokenizer
from mlx_troupe.runtime.models.spec import ModelSpec

from .gguf_models import VOCABULARY, write_tokens

PARTS = (
    *(
        "a",
        "the ",
        "ing",
        "Zoë",
        "I'm",
        "'T",
        "é",
        "e\u0301",
        "漢字",
        "😀",
        "👩\u200d👩\u200d👧",
        ".",
        "<b>",
        "$1,234.5",
    ),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "0", "42", "1234567", "½", "Ⅷ", "م", "ß"),
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def texts(count: int = 300) -> list[str]:
    generator = random.Random(0)
    return ["", *("".join(generator.choices(PARTS, k=generator.randint(1, 25))) for _ in range(count))]


def byte_level_file(folder: Path, splitter: str) -> GgufFile:
    path = folder / "tokens.gguf"
    writer = GGUFWriter(path, "llama")
    write_tokens(writer, splitter)
    return finished(writer, path)


def finished(writer: GGUFWriter, path: Path) -> GgufFile:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def tokenizer_of(file: GgufFile, folder: Path, rows: int = VOCABULARY) -> tuple[Tokenizer, Vocabulary]:
    vocabulary = write_tokenizer(file, folder, rows, 2048)
    return Tokenizer.from_file(str(folder / "tokenizer.json")), vocabulary


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_byte_level_text_comes_back_whole(splitter: str, tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_of(byte_level_file(tmp_path, splitter), tmp_path)
    normalise = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    for text in texts():
        assert tokenizer.decode(tokenizer.encode(text).ids) == normalise(text)


@pytest.mark.parametrize(
    ("splitter", "original"),
    [
        ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])),
        ("gpt-2", GPT2),
        (
            "qwen2",
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
        ),
        (
            "llama-bpe",
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                "isolated",
            ),
        ),
    ],
)
def test_text_is_cut_as_by_the_original_tokenizer(
    splitter: str, original: pre_tokenizers.PreTokenizer, tmp_path: Path
) -> None:
    tokenizer, _ = tokenizer_of(byte_level_file(tmp_path, splitter), tmp_path)
    for text in texts():
        ours = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert ours == [span for _, span in original.pre_tokenize_str(text)], text


def test_byte_level_ids_equal_the_tokenizer_the_file_was_made_from(tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_of(byte_level_file(tmp_path, "gpt-2"), tmp_path)
    original = Tokenizer.from_str(tokenizer_json(VOCABULARY))
    for text in texts():
        assert tokenizer.encode(text).ids == original.encode(text).ids


def test_special_tokens_chat_template_and_ends(tmp_path: Path) -> None:
    file = byte_level_file(tmp_path, "smollm")
    tokenizer, vocabulary = tokenizer_of(file, tmp_path)
    assert vocabulary.ends == (258, 256)
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [257, 64, 258]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | vocabulary.config()))
    wrapper = load_tokenizer(ModelSpec(path=tmp_path, name="", served_name="", source="gguf"))
    assert wrapper.eos_token_ids == {256, 258}
    assert wrapper.apply_chat_template([{"role": "user", "content": "a"}]) == [257, 64, 258]
    assert wrapper.model_max_length == 2048


def test_begin_token_is_added_to_raw_text_when_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    writer = GGUFWriter(path, "llama")
    write_tokens(writer, "smollm")
    writer.add_add_bos_token(True)
    tokenizer, vocabulary = tokenizer_of(finished(writer, path), tmp_path)
    assert tokenizer.encode("a").ids == [vocabulary.bos, 64]
    assert tokenizer.encode("a", add_special_tokens=False).ids == [64]


def test_unknown_splitter_and_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'viking'.*smollm"):
        tokenizer_of(byte_level_file(tmp_path, "viking"), tmp_path)
    path = tmp_path / "wordpiece.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a"])
    with pytest.raises(UnsupportedModel, match="'bert'"):
        tokenizer_of(finished(writer, path), tmp_path)


def test_more_tokens_than_embedding_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="319 embedding rows"):
        tokenizer_of(byte_level_file(tmp_path, "smollm"), tmp_path, rows=VOCABULARY - 1)


def test_duplicate_tokens_keep_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "a", "", "ab"])
    writer.add_token_merges(["a b"])
    tokenizer, _ = tokenizer_of(finished(writer, path), tmp_path)
    assert tokenizer.get_vocab_size() == 5
    assert tokenizer.encode("aab").ids == [0, 4]


CORPUS = Path(__file__).read_text().split("\n") * 2 + [text for text in texts() if text.strip()]


@pytest.fixture(scope="module", params=[True, False], ids=["llama", "gemma"])
def trained(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, bool]:
    """A SentencePiece model as Llama's (space before the text) and as Gemma's (user-defined white space)."""
    space_prefix: bool = request.param
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=space_prefix,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=[] if space_prefix else ["\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581\u2581", "<b>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), space_prefix


def sentencepiece_file(model: sentencepiece.SentencePieceProcessor, space_prefix: bool, folder: Path) -> GgufFile:
    """As llama.cpp's converter writes it: spaces instead of the mark in user-defined tokens."""
    user_defined = {"\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581\u2581", "<b>"}
    tokens, types = [], []
    for i in range(model.vocab_size()):
        piece = model.id_to_piece(i)
        kind = 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        if not space_prefix and piece in user_defined:
            kind, piece = 4, piece.replace("\u2581", " ")
        tokens.append(piece)
        types.append(kind)
    path = folder / "tokens.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([model.get_score(i) for i in range(model.vocab_size())])
    writer.add_token_types(types)
    writer.add_add_space_prefix(space_prefix)
    writer.add_unk_token_id(model.unk_id())
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    return finished(writer, path)


def test_sentencepiece_ids_equal_the_original(
    trained: tuple[sentencepiece.SentencePieceProcessor, bool], tmp_path: Path
) -> None:
    model, space_prefix = trained
    file = sentencepiece_file(model, space_prefix, tmp_path)
    tokenizer, vocabulary = tokenizer_of(file, tmp_path, rows=model.vocab_size())
    assert vocabulary.add_bos
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == model.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_gets_mlx_lms_fast_detokenizer(
    trained: tuple[sentencepiece.SentencePieceProcessor, bool], tmp_path: Path
) -> None:
    model, space_prefix = trained
    file = sentencepiece_file(model, space_prefix, tmp_path)
    _, vocabulary = tokenizer_of(file, tmp_path, rows=model.vocab_size())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | vocabulary.config()))
    wrapper = load_tokenizer(ModelSpec(path=tmp_path, name="", served_name="", source="gguf"))
    detokenizer = wrapper.detokenizer
    assert type(detokenizer).__name__ == "SPMStreamingDetokenizer"
    text = "Zoë pays 42 😀 to\nthe   漢字"
    for token in wrapper.encode(text, add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_sentencepiece_without_scores_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    with pytest.raises(InvalidModel, match="no scores"):
        tokenizer_of(finished(writer, path), tmp_path)


def test_score_count_must_match(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    writer.add_token_scores(np.zeros(1).tolist())
    with pytest.raises(InvalidModel, match="array of 2 numbers"):
        tokenizer_of(finished(writer, path), tmp_path)
