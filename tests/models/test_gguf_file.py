"""A hostile GGUF file gives a ModelError: no crash, no hang, no allocation beyond its size."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf import GGUFReader

from mlx_troupe.runtime.models.errors import InvalidModel, ModelError, ModelNotFound, UnsupportedModel
from mlx_troupe.runtime.models.gguf_convert import Form, convert_gguf
from mlx_troupe.runtime.models.gguf_file import GgufFile

from .gguf_models import build_pair, model_config

if TYPE_CHECKING:
    from pathlib import Path

HUGE = 2**63 - 1
STRING, ARRAY, UINT32 = 8, 9, 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = model_config("llama", num_hidden_layers=1)
    path, _ = build_pair("llama", tmp_path_factory.mktemp("gguf"), config=config)
    return path


def written(folder: Path, *parts: bytes) -> Path:
    path = folder / "hostile.gguf"
    path.write_bytes(b"".join(parts))
    return path


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_metadata_and_tensors_equal_those_of_the_gguf_package(sound: Path) -> None:
    ours, theirs = GgufFile(sound), GGUFReader(sound)
    for field in theirs.fields.values():
        if not field.name.startswith("GGUF."):
            expected, value = field.contents(), ours.metadata[field.name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
    assert [*ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for expected in theirs.tensors:
        np.testing.assert_array_equal(
            ours.rows(ours.tensors[expected.name]).reshape(-1), expected.data.view(np.uint8).reshape(-1)
        )


HOSTILE = {
    "empty": b"",
    "other magic": b"PK\x03\x04" + bytes(100),
    "ends in the header": b"GGUF\x03\x00",
    "huge key count": header(keys=HUGE),
    "huge tensor count": header(tensors=HUGE),
    "many keys claimed": header(keys=60000),
    "huge key": header(keys=1) + text(b"a", HUGE),
    "huge string": header(keys=1) + text(b"a") + struct.pack("<I", STRING) + text(b"x", HUGE),
    "huge number array": header(keys=1) + text(b"a") + struct.pack("<IIQ", ARRAY, UINT32, HUGE),
    "huge string array": header(keys=1) + text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 2**22),
    "string array wraps around": header(keys=1)
    + text(b"a")
    + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**64 - 8)
    + bytes(64),
    "nested arrays": header(keys=1) + text(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 1) * 1,
    "unknown value type": header(keys=1) + text(b"a") + struct.pack("<I", 99) + bytes(8),
    "key twice": header(keys=2) + (text(b"a") + struct.pack("<II", UINT32, 1)) * 2,
    "tensor twice": header(tensors=2) + tensor(b"a", (1,)) * 2 + bytes(64),
    "tensor beyond the end": header(tensors=1) + tensor(b"a", (1,), offset=2**40),
    "tensor offset wraps around": header(tensors=1) + tensor(b"a", (8,), offset=2**64 - 32) + bytes(64),
    "tensor shape overflows": header(tensors=1) + tensor(b"a", (2**33, 2**33)),
    "tensor of no elements": header(tensors=1) + tensor(b"a", (0, 5)) + bytes(64),
    "too many dimensions": header(tensors=1) + tensor(b"a", (1,) * 9) + bytes(64),
    "no dimensions": header(tensors=1) + tensor(b"a", ()) + bytes(64),
    "rows that do not fill blocks": header(tensors=1) + tensor(b"a", (33, 2), kind=2) + bytes(256),
    "alignment is no power of two": header(keys=1) + text(b"general.alignment") + struct.pack("<II", UINT32, 7),
    "alignment zero": header(keys=1) + text(b"general.alignment") + struct.pack("<II", UINT32, 0),
    "invalid text": header(keys=1) + text(b"\xff\xfe") + struct.pack("<I", STRING) + text(b"\xff"),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_header_is_an_error_that_allocates_nothing(content: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            convert_gguf(path, form=Form("float32"))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_unknown_block_type_and_version_are_unsupported(tmp_path: Path) -> None:
    for content in (header(tensors=1) + tensor(b"a", (32,), kind=77) + bytes(64), header(version=1)):
        with pytest.raises(UnsupportedModel):
            GgufFile(written(tmp_path, content))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        GgufFile(tmp_path / "missing.gguf")
    with pytest.raises(InvalidModel):
        GgufFile(tmp_path)


def test_every_truncation_is_an_error(sound: Path, tmp_path: Path) -> None:
    content = sound.read_bytes()
    generator = random.Random(0)
    for length in [*range(0, 200, 7), *(generator.randrange(len(content)) for _ in range(60))]:
        with pytest.raises(ModelError):
            convert_gguf(written(tmp_path, content[:length]), form=Form("float32"))


def test_random_damage_never_escapes_as_another_exception(sound: Path, tmp_path: Path) -> None:
    content = sound.read_bytes()
    end = GgufFile(sound).header_bytes
    generator = random.Random(1)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 1, 4, 30))):
            damaged[generator.randrange(4, end)] = generator.choice((0, 1, 0x7F, 0xFF, generator.randrange(256)))
        try:
            convert_gguf(written(tmp_path, bytes(damaged)), form=Form("float32"))
        except ModelError:
            continue


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**31 - 1),
        ("llama.embedding_length", 2**31 - 1),
        ("llama.embedding_length", 0),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 3),
        ("llama.feed_forward_length", 2**31 - 1),
        ("llama.context_length", 0),
        ("tokenizer.ggml.eos_token_id", 10**6),
    ],
)
def test_claims_that_the_tensors_do_not_bear_out(sound: Path, tmp_path: Path, key: str, value: int) -> None:
    content = sound.read_bytes()
    at = content.index(text(key.encode())) + 8 + len(key) + 4
    path = written(tmp_path, content[:at], struct.pack("<I", value), content[at + 4 :])
    with pytest.raises(ModelError):
        convert_gguf(path, form=Form("float32"))
