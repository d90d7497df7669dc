"""From what the user named to a checked folder on this disk.

In this order: nothing (the default model), "demo", an existing folder, a `.gguf` file, a Hugging Face id.
Nothing is downloaded unless the caller allows it, which only the command line does.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from . import hub
from .demo import DEMO, SERVED_NAME, demo_folder
from .errors import ModelDownloadFailed, ModelError, ModelNotFound
from .gguf_convert import Form, convert_gguf
from .machine import is_linux_cpu
from .progress import Report, ignore
from .safety import check_folder
from .spec import ModelSpec, Quantize

log = logging.getLogger(__name__)

DEFAULT_HUB_MODEL = "mlx-community/Qwen3-0.6B-4bit"
"""Served when nothing is named, on a machine with a GPU and a hub in reach."""


class _Request(msgspec.Struct, frozen=True):
    """The caller's wishes, as `resolve` takes them."""

    revision: str | None
    offline: bool
    allow_download: bool
    report: Report
    cache_folder: Path | None
    form: Form | None

    @property
    def may_download(self) -> bool:
        return self.allow_download and not self.offline


def resolve(
    name: str | None,
    *,
    revision: str | None = None,
    quantize: Quantize | None = None,
    offline: bool = False,
    allow_download: bool = False,
    progress: Report = ignore,
    cache_dir: Path | None = None,
    served_name: str = "",
    cpu_float32: bool = False,
    form: Form | None = None,
) -> ModelSpec:
    """Find `name`, fetch and convert it where needed and allowed, and check it.

    Args:
        name: None, "demo", a folder, a `.gguf` file or a hub id.
        revision: branch, tag or commit of a hub model.
        quantize: "q4" or "q8" while loading.
        offline: never use the network; what is cached still works.
        allow_download: fetch what is not cached.
        progress: told about downloads and conversions.
        cache_dir: for conversions; the user's own cache by default.
        served_name: what clients call the model; empty is its own name.
        cpu_float32: load 16-bit weights as float32.
        form: what the weights of a GGUF file (or the demo) become; what suits the machine by default.

    Raises `ModelError`; its subclasses say what is wrong.
    """
    request = _Request(revision, offline, allow_download, progress, cache_dir, form)
    spec = _default(request) if name is None else _named(name, request)
    return msgspec.structs.replace(
        spec, served_name=served_name or spec.served_name, quantize=quantize, cpu_float32=cpu_float32
    )


def _named(name: str, request: _Request) -> ModelSpec:
    path = Path(name).expanduser()
    if name != DEMO and (path.is_dir() or path.suffix == ".gguf" or not hub.is_hub_id(name)):
        _refuse_revision(name, request)
        return _local(name, path, request)
    if name == DEMO:
        _refuse_revision(name, request)
        return _demo(request)
    return _from_hub(name, request)


def _local(name: str, path: Path, request: _Request) -> ModelSpec:
    if path.suffix == ".gguf" and not path.is_dir():
        folder = convert_gguf(path, form=request.form, cache_folder=request.cache_folder, report=request.report)
        return ModelSpec(path=folder, name=name, served_name=path.stem, source="gguf")
    if not name or not path.is_dir():
        raise ModelNotFound(
            f"{name!r} is neither a folder, a .gguf file, a Hugging Face id (owner/model) nor {DEMO!r}. "
            "Check the spelling."
        )
    check_folder(path)
    return ModelSpec(path=path, name=name, served_name=path.resolve().name, source="folder")


def _refuse_revision(name: str, request: _Request) -> None:
    if request.revision is not None:
        raise ModelError(f"--revision is for Hugging Face models; {name} is none. Leave it out.")


def _demo(request: _Request) -> ModelSpec:
    folder = demo_folder(allow_download=request.may_download, cache_folder=request.cache_folder, report=request.report)
    return ModelSpec(path=folder, name=DEMO, served_name=SERVED_NAME, source="demo")


def _from_hub(name: str, request: _Request) -> ModelSpec:
    if request.may_download and not hub.is_offline():
        folder = hub.download_snapshot(name, request.revision, request.report)
    else:
        folder = hub.cached_snapshot(name, request.revision)
        check_folder(folder)
    return ModelSpec(path=folder, name=name, served_name=name, source="hub", revision=folder.name)


def _default(request: _Request) -> ModelSpec:
    """A small instruct model from the hub where that is quick and in reach; else the demo model.

    On a Linux processor it is the demo: 4-bit and 16-bit weights are slow there.
    """
    if request.revision is not None:
        raise ModelError("--revision needs --model with a Hugging Face id. Leave it out or name a model.")
    if is_linux_cpu() or not request.may_download or hub.is_offline() or not hub.is_reachable():
        return _demo_or_cached(request)
    try:
        return _from_hub(DEFAULT_HUB_MODEL, request)
    except (ModelDownloadFailed, ModelNotFound) as error:
        log.warning("%s Serving the demo model instead.", error)
        return _demo(request)


def _demo_or_cached(request: _Request) -> ModelSpec:
    """Without the network: the default model if an earlier start fetched it, else the demo."""
    if not is_linux_cpu():
        try:
            return _from_hub(DEFAULT_HUB_MODEL, msgspec.structs.replace(request, allow_download=False))
        except ModelNotFound:
            pass
    return _demo(request)
