"""The disk tier with a tracer: the same I/O, recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tier import DiskTier

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ..page_blob import PageBlob
    from ..prefix_page import PageRecord
    from ..tracing import Tracer


class TracedTier(DiskTier):
    """See `DiskTier`; used by the I/O thread alone."""

    tracer: Tracer

    def write(self, record: PageRecord, blob: PageBlob) -> int:
        """See `DiskTier.write`."""
        with self.tracer.span("write page", bytes=blob.nbytes):
            return super().write(record, blob)

    def fetch(self, chain: bytes) -> PageBlob | None:
        """See `DiskTier.fetch`."""
        with self.tracer.span("fetch page"):
            return super().fetch(chain)

    def delete(self, chains: Iterable[bytes]) -> None:
        """See `DiskTier.delete`."""
        with self.tracer.span("delete pages"):
            super().delete(chains)


def make_tier(tracer: Tracer | None, top: Path, root: str, budget_bytes: int, *, about: str = "") -> DiskTier:
    """A tier, traced if there is a tracer."""
    if tracer is None:
        return DiskTier(top, root, budget_bytes, about=about)
    tier = TracedTier(top, root, budget_bytes, about=about)
    tier.tracer = tracer
    return tier
