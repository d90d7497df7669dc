"""What every route needs, and the requests at work."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from .errors import SERVER, ApiError
from .keys import ApiKeys
from .limits import KeyLimits
from .response_store import ResponseStore
from .tracing import NO_TRACING
from .version import package_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..runtime.directory import ModelDirectory
    from ..runtime.generation import Generation, ModelInfo
    from .http_metrics import HttpMetrics
    from .settings import ServerSettings
    from .tracing import Tracing

LOADING_RETRY_AFTER_S = 5.0


class ApiContext:
    """What is behind the routes; owned by the event loop's thread.

    Attributes:
        models: those served.
        settings: of the server.
        metrics: of HTTP.
        keys: who may ask.
        limits: how much each may.
        responses: answers that may be gone on from.
        tracing: spans of requests.
    """

    def __init__(
        self,
        models: ModelDirectory,
        settings: ServerSettings,
        metrics: HttpMetrics,
        keys: ApiKeys | None = None,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.tracing = tracing
        self.keys = keys or ApiKeys()
        self.responses = ResponseStore(settings.stored_responses_bytes, settings.stored_responses_ttl_s)
        self.limits = KeyLimits(settings.max_concurrent_per_key, settings.max_requests_per_minute_per_key)
        self.models = models
        self.settings = settings
        self.metrics = metrics
        self._at_work: dict[str, tuple[str, ...]] = {}
        self._fingerprints: dict[tuple[str, ...], str] = {}

    def fingerprint(self, model: ModelInfo) -> str:
        """Of what decides the answer to a seeded request: the model, its form, and this package's version."""
        facts = (model.name, model.layout, model.quantized or "", str(model.weight_bytes))
        found = self._fingerprints.get(facts)
        if found is None:
            digest = hashlib.sha256("\0".join((package_version(), *facts)).encode())
            found = self._fingerprints[facts] = f"fp_{digest.hexdigest()[:12]}"
        return found

    def own_prefixes(self, generation: Generation, key_name: str) -> Generation:
        """The request with its key's own part of the prefix cache, apart from that of every other key.

        Whether a prefix was cached shows in an answer's time and usage, so another key's prefixes are never looked at,
        whatever salt a request brings.
        """
        owner = self.keys.owner(key_name)
        if len(self.keys) < 2 or self.settings.share_cache_across_keys or not owner:
            return generation
        return msgspec.structs.replace(generation, cache_salt=f"{owner}:{generation.cache_salt}")

    def require_ready(self) -> None:
        """Raise ApiError (503) unless new requests are looked at, before their bodies are read."""
        readiness = self.models.accepts()
        if not readiness.ready:
            detail = f": {readiness.detail}" if readiness.detail else ""
            raise ApiError(
                f"No requests are served now ({readiness.reason}){detail}",
                status=503,
                kind=SERVER,
                code=readiness.reason or "not_ready",
                retry_after_s=LOADING_RETRY_AFTER_S,
            )

    @contextmanager
    def at_work(self, names: Iterable[str], request_ids: Sequence[str]) -> Iterator[None]:
        """While the block runs, `cancel` finds the runtime's requests under each of the names."""
        entry = tuple(request_ids)
        names = tuple(names)
        for name in names:
            self._at_work[name] = entry
        try:
            yield
        finally:
            for name in names:
                if self._at_work.get(name) is entry:
                    del self._at_work[name]

    def cancel(self, name: str) -> bool:
        """Cancel the request of that id or X-Request-Id. False if none is at work."""
        entry = self._at_work.get(name)
        for request_id in entry or ():
            self.models.cancel(request_id)
        return entry is not None


CONTEXT = web.AppKey("context", ApiContext)
