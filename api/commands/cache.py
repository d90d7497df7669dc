"""`mlx-troupe cache`: prefixes on this disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..runtime_access import prefix_cache
from ..terminal import note, size
from .common import FAILURE, OK, Invocation

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ..runtime_access import CachedPrefixes

NAME = "cache"
HELP = "show, check and delete the prefixes on this disk"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its three verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    shown = verbs.add_parser("info", help="pages and bytes of each model")
    checked = verbs.add_parser("verify", help="read every page and check its digest; fails when one is damaged")
    cleared = verbs.add_parser("clear", help="delete the pages of models that no server uses")
    for verb in (shown, checked, cleared):
        verb.add_argument("--cache-dir", default="", help="folder of the cache (default: the user's)")
        verb.add_argument("--json", action="store_true", help="print JSON")


def run(invocation: Invocation) -> int:
    """Do what the verb says."""
    arguments = invocation.arguments
    cache = prefix_cache(arguments.cache_dir or invocation.settings.runtime.cache_dir)
    match arguments.verb:
        case "info":
            _show(cache.reports(), as_json=arguments.json)
        case "verify":
            found = cache.verify()
            _show(found, as_json=arguments.json)
            damaged = [name for report in found for name in report.damaged]
            for name in damaged:
                note(f"damaged: {name}")
            return FAILURE if damaged else OK
        case "clear":
            return _clear(*cache.clear(), as_json=arguments.json)
    return OK


def _clear(freed_bytes: int, left: Sequence[CachedPrefixes], *, as_json: bool) -> int:
    if as_json:
        print(msgspec.json.encode({"freed_bytes": freed_bytes, "in_use": [report.folder for report in left]}).decode())
    else:
        print(f"freed {size(freed_bytes)}")
    for report in left:
        note(f"in use by a server, left alone: {report.about or report.folder}")
    return FAILURE if left else OK


def _show(reports: Sequence[CachedPrefixes], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(list(reports)).decode())
        return
    if not reports:
        note("no prefixes on this disk; servers keep some with --cache-disk-bytes")
        return
    rows = [("MODEL", "PAGES", "SIZE", "STATE", "FOLDER")]
    for report in reports:
        state = report.problem or ("damaged" if report.damaged else "in use" if report.in_use else "idle")
        rows.append((report.about or "-", str(report.pages), size(report.bytes), state, report.folder))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
