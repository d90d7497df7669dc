"""Convert a GGUF file into a folder that `mlx_lm.load` reads, once, into the user's cache.

Weights become float32, one of the 16-bit types, or MLX's packed integers (see `gguf_blocks`). Everything is
done with numpy in pieces of a few MiB: no MLX, any thread, and memory stays far below the model's size.

Invariants: the folder appears complete or not at all; `manifest.json` holds the SHA-256 of every tensor;
two processes never convert the same file at once; the same file and settings give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from .cache_folder import build_folder, default_cache_folder, locked
from .gguf_blocks import GROUP
from .gguf_families import Layout, match_family
from .gguf_file import GgufFile
from .gguf_tokenizer import write_tokenizer
from .gguf_weights import Scales, TensorPlan, Weights, plan_weights, write_weights
from .machine import is_linux_cpu
from .progress import Report, ignore

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Raised when the result changes, so that old conversions are made again."""
MANIFEST = "manifest.json"
MEMORY_SHARE = 0.6
"""Most of the machine's memory that float32 weights may take."""
SAMPLES = 64
SAMPLE_BYTES = 4096


class Form(msgspec.Struct, frozen=True):
    """What weights become.

    Attributes:
        weights: "float32", "float16", "bfloat16", or "packed" (integers of 4, 5 and 8 bits stay as they are).
        scales: of packed weights, and so the type of activations: "float32" loses nothing, "half" is the
            family's 16-bit type.
    """

    weights: Weights
    scales: Scales = "float32"

    @property
    def name(self) -> str:
        """For folder names."""
        return f"packed-{self.scales}" if self.weights == "packed" else self.weights


def default_form(parameters: int = 0, memory_bytes: int | None = None) -> Form:
    """What suits a model of so many `parameters` on this machine, which has `memory_bytes` (asked if None).

    On a Linux processor only float32 is fast, unless it takes too much memory; elsewhere packed weights with
    16-bit scales are.
    """
    if not is_linux_cpu():
        return Form("packed", "half")
    memory_bytes = psutil.virtual_memory().total if memory_bytes is None else memory_bytes
    if 4 * parameters <= MEMORY_SHARE * memory_bytes:
        return Form("float32")
    log.warning(
        "as float32 this model takes %d MiB, too much for this machine: its weights stay packed, which is slow "
        "on a Linux processor",
        4 * parameters >> 20,
    )
    return Form("packed")


def convert_gguf(
    path: Path, *, form: Form | None = None, cache_folder: Path | None = None, report: Report = ignore
) -> Path:
    """The converted folder of the GGUF file at `path`; converts it when the cache lacks it.

    `form` is what suits this machine by default, `cache_folder` the user's own cache. Raises
    `ModelNotFound`, `InvalidModel`, `UnsupportedModel`, or `ModelError` when the cache cannot be written.
    """
    file = GgufFile(path)
    form = form or default_form(sum(math.prod(tensor.shape) for tensor in file.tensors.values()))
    identity = _identity(file, form)
    cache = cache_folder or default_cache_folder()
    target = cache / "models" / f"{path.stem}-{form.name}-{identity[:12]}"
    if is_complete(target):
        return target
    with locked(target):
        if not is_complete(target):
            write_conversion(path, target, form, origin=str(path.resolve()), report=report)
    return target


def write_conversion(path: Path, target: Path, form: Form, *, origin: str, report: Report = ignore) -> None:
    """Convert the GGUF file at `path` into the folder `target`, which appears when it is complete.

    `origin` says where the file came from. The caller holds the lock of `target`. Raises as `convert_gguf`.
    """
    file = GgufFile(path)
    layout = match_family(file)
    plans = plan_weights(file, layout, form.weights, form.scales)
    needed_bytes = sum(slot.size_bytes for plan in plans for slot in plan.slots)
    log.info("converting %s to %s weights, once, in %s", path, form.name, target)
    with build_folder(target, needed_bytes=needed_bytes) as folder:
        _write_configuration(file, layout, plans, folder)
        digests = write_weights(file, plans, folder / "model.safetensors", report)
        manifest = {
            "converter": CONVERTER_VERSION,
            "origin": origin,
            "source_bytes": file.size_bytes,
            "form": form.name,
            "architecture": layout.family.architecture,
            "blocks": dict(Counter(plan.source.block_type.name for plan in plans if len(plan.source.shape) > 1)),
            "weight_bytes": (folder / "model.safetensors").stat().st_size,
            "tensors": digests,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a finished conversion whose weight file has the recorded size."""
    manifest = read_manifest(folder)
    model = folder / "model.safetensors"
    return manifest is not None and model.exists() and model.stat().st_size == manifest.get("weight_bytes")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a conversion; None when `folder` is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _write_configuration(file: GgufFile, layout: Layout, plans: list[TensorPlan], folder: Path) -> None:
    rows, context_tokens = layout.config["vocab_size"], layout.config["max_position_embeddings"]
    token_ids = write_tokenizer(file, folder, rows, context_tokens).config()
    config = layout.config | token_ids | _quantization(plans)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(token_ids, indent=1))


def _quantization(plans: list[TensorPlan]) -> dict[str, Any]:
    """mlx-lm's `quantization` entry: the commonest bits, and each layer that differs."""
    bits = {plan.module: plan.bits for plan in plans if plan.bits is not None}
    if not bits:
        return {}
    values = list(bits.values())
    common = max(sorted(set(values)), key=values.count)
    others = {module: {"group_size": GROUP, "bits": n} for module, n in bits.items() if n != common}
    return {"quantization": {"group_size": GROUP, "bits": common, **others}}


def _identity(file: GgufFile, form: Form) -> str:
    """A digest of the header, the size and samples of the data: enough to tell fine-tunes apart."""
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {form.name} {file.size_bytes}".encode())
    digest.update(file.bytes_at(0, file.header_bytes))
    step = max((file.size_bytes - file.header_bytes) // SAMPLES, 1)
    for sample in range(SAMPLES):
        digest.update(file.bytes_at(file.header_bytes + sample * step, SAMPLE_BYTES))
    return digest.hexdigest()
