"""Made-up pages of made-up prefixes, whose bytes tell which tokens they belong to."""

from __future__ import annotations

from hashlib import sha256

from mlx_troupe.runtime.page_blob import ArraySpec, PageBlob, PageLayout, StateSpec
from mlx_troupe.runtime.prefix_page import PageRecord, child_chain, root_chain, token_key

ROOT = "a" * 64
PAGE_TOKENS = 4
DATA_BYTES = 4096


def content(chain: bytes) -> bytes:
    """What the page of this chain holds."""
    return sha256(chain).digest() * (DATA_BYTES // 32)


def blob(chain: bytes, low: int = 0) -> PageBlob:
    """A page with a checkpoint."""
    data = content(chain)
    layout = PageLayout(
        low,
        low + PAGE_TOKENS,
        ((ArraySpec("float32", (1, 1, 4, 128)),),),
        (StateSpec((low + PAGE_TOKENS,), (ArraySpec("bfloat16", (2, 512)), None)),),
    )
    return PageBlob(layout, (data[:2048], data[2048:]))


def records(tokens: list[int], namespace: str = "") -> list[PageRecord]:
    """The whole pages of a prompt, parents first."""
    parent, out = root_chain(namespace), []
    for low in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
        key = token_key(tokens[low : low + PAGE_TOKENS])
        chain = child_chain(parent, key)
        out.append(PageRecord(chain, parent, namespace, key, True, 0, len(out) + 1))
        parent = chain
    return out
