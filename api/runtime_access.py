"""The one place where the command line reaches the runtime. Everything is imported on use: MLX is slow to import, and a
BLAS must be loaded before it, which the runtime sees to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ..runtime.config import RuntimeConfig
    from ..runtime.pool.settings import PooledModel, PoolSettings
    from .server import DirectoryContext, ServiceContext
    from .settings import ServerSettings

    Report = Callable[["ProgressReport"], None]
    OpenRuntime = Callable[[RuntimeConfig, Report | None], ServiceContext]
    OpenRemote = Callable[[RuntimeConfig, Report | None, ServerSettings], ServiceContext]


class ProgressReport(Protocol):
    """What a download or conversion says of itself: `done` of `total` units (None while unknown) of a named stage."""

    @property
    def stage(self) -> str: ...

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int | None: ...

    @property
    def unit(self) -> str: ...


class CachedModel(Protocol):
    """One model on this disk, as the catalog describes it."""

    name: str
    kind: str
    path: Path
    size_bytes: int
    revision: str
    architecture: str
    quantisation: str
    problem: str
    origin: str


class PulledModel(Protocol):
    """A model that is on this disk now."""

    path: Path
    served_name: str
    revision: str


class CachedPrefixes(Protocol):
    """One model's prefixes on this disk."""

    folder: str
    about: str
    pages: int
    bytes: int
    in_use: bool
    damaged: tuple[str, ...]
    problem: str


class PrefixFolder(Protocol):
    """The prefixes of all models on this disk."""

    def reports(self) -> Sequence[CachedPrefixes]: ...

    def verify(self) -> Sequence[CachedPrefixes]: ...

    def clear(self) -> tuple[int, Sequence[CachedPrefixes]]: ...


class Catalog(Protocol):
    """The models on this disk. All raise TroupeError whose text says what to do."""

    def list_models(self) -> list[CachedModel]: ...

    def model_info(self, name: str) -> list[CachedModel]: ...

    def remove_model(self, name: str) -> int: ...

    def pull(self, name: str, revision: str | None, *, progress: Report) -> PulledModel: ...


def open_runtime(config: RuntimeConfig, progress: Report | None) -> ServiceContext:
    """A runtime that loads when entered."""
    from ..runtime import Runtime

    return Runtime(config, progress=progress)


def open_remote_runtime(config: RuntimeConfig, progress: Report | None, server: ServerSettings) -> ServiceContext:
    """A runtime in a process of its own, which starts when entered. This process never imports MLX."""
    from ..runtime.remote import RemoteRuntime, start_child
    from .engine_process import command

    line = command(server.log_level, server.log_format, server.event_loop)
    return RemoteRuntime(config, start=lambda: start_child(line), progress=progress)


def open_pool(models: Sequence[PooledModel], settings: PoolSettings) -> DirectoryContext:
    """Several models, which are loaded when they are needed."""
    from ..runtime.pool.pool import ModelPool

    return ModelPool(models, settings)


def catalog() -> Catalog:
    """The models on this disk."""
    from ..runtime import catalog as module

    found: Any = module
    return found  # type: ignore[no-any-return]


def prefix_cache(folder: str) -> PrefixFolder:
    """The prefix cache in a folder; an empty name is the user's."""
    from ..runtime.prefix_cache import PrefixFolder as Real

    found: Any = Real(folder)
    return found  # type: ignore[no-any-return]


def diagnostics() -> Mapping[str, Mapping[str, Any]]:
    """Facts about device, memory, BLAS and versions, by section."""
    from ..runtime.diagnostics import report

    return report()
