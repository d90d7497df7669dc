"""How a prompt is compared with stored pages: pure functions over a tree's nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .prefix_page import KEY_BYTES, Page, common_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable


def walk(root: Page, key: bytes, width: int, *, ram_only: bool = False) -> list[Page]:
    """Whole pages along `key`, pages being `width` bytes of it; with `ram_only` up to the first that is not in RAM."""
    path: list[Page] = []
    node, at = root, 0
    while at + width <= len(key) and (child := node.children.get(key[at : at + width])) is not None:
        if ram_only and not child.in_ram:
            break
        path.append(child)
        node, at = child, at + width
    return path


def longest_slice(node: Page, rest: bytes, *, ram_only: bool = False) -> tuple[Page | None, int]:
    """The child that shares the longest start with `rest`, and how many bytes (whole tokens) it shares.

    Of equals, one in RAM.
    """
    best, best_common = None, 0
    for child in node.by_first.get(rest[:KEY_BYTES], {}).values():
        if ram_only and not child.in_ram:
            continue
        common = common_bytes(rest, child.key)
        if common > best_common or (common == best_common and best is not None and child.in_ram > best.in_ram):
            best, best_common = child, common
    return best, best_common


def deepest_checkpoint(root: Page, path: list[Page], key: bytes, width: int, *, ram_only: bool = False) -> list[Page]:
    """The part of `path`, or a tail beside it, that ends at the deepest checkpoint; [] when there is none."""
    for count in range(len(path), -1, -1):
        node = path[count - 1] if count else root
        tails = node.tails(key[count * width :], width)
        tail = longest(page for page in tails if page.state and (page.in_ram or not ram_only))
        if tail is not None:
            return [*path[:count], tail]
        if count and node.state:
            return path[:count]
    return []


def longest(pages: Iterable[Page]) -> Page | None:
    """The page with most tokens."""
    return max(pages, key=lambda page: len(page.key), default=None)
