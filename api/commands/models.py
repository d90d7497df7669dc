"""`mlx-troupe models`: the models on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..runtime_access import catalog
from ..terminal import note, progress_bar, size
from .common import OK, Invocation

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ..runtime_access import CachedModel, Catalog

NAME = "models"
HELP = "list, fetch, describe and remove models on this machine"

_FIELDS = (
    "name",
    "kind",
    "architecture",
    "quantisation",
    "size_bytes",
    "revision",
    "path",
    "origin",
    "problem",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its four verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    listed = verbs.add_parser("list", help="models on this machine")
    pulled = verbs.add_parser("pull", help='fetch a Hugging Face model or "demo"')
    pulled.add_argument("name")
    pulled.add_argument("--revision", help="branch, tag or commit")
    shown = verbs.add_parser("info", help="all there is to know of one model")
    shown.add_argument("name")
    removed = verbs.add_parser("remove", help="delete a model's files")
    removed.add_argument("name")
    for verb in (listed, shown):
        verb.add_argument("--json", action="store_true", help="print JSON")


def run(invocation: Invocation) -> int:
    """Do what the verb says. Raises TroupeError for a model that is not there."""
    arguments = invocation.arguments
    models = catalog()
    match arguments.verb:
        case "list":
            _list(models.list_models(), as_json=arguments.json)
        case "info":
            _info(models.model_info(arguments.name), as_json=arguments.json)
        case "remove":
            print(f"removed {arguments.name}: {size(models.remove_model(arguments.name))}")
        case "pull":
            _pull(models, arguments)
    return OK


def _pull(models: Catalog, arguments: argparse.Namespace) -> None:
    bar = progress_bar()
    try:
        model = models.pull(arguments.name, arguments.revision, progress=bar or (lambda _: None))
    finally:
        if bar is not None:
            bar.close()
    print(f"{model.served_name}{'@' + model.revision if model.revision else ''}: {model.path}")


def _list(models: Sequence[CachedModel], *, as_json: bool) -> None:
    if as_json:
        _print_json(models)
        return
    if not models:
        note("no models here yet; see: mlx-troupe models pull NAME")
        return
    rows = [("NAME", "SIZE", "ARCHITECTURE", "QUANTISATION", "REVISION")]
    rows += [
        (
            model.name,
            size(model.size_bytes),
            model.architecture or "-",
            "unusable" if model.problem else model.quantisation or "-",
            model.revision[:8] or "-",
        )
        for model in models
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _info(models: Sequence[CachedModel], *, as_json: bool) -> None:
    if as_json:
        _print_json(models)
        return
    for place, model in enumerate(models):
        if place:
            print()
        for name, value in _plain(model).items():
            if value != "":
                print(f"{name + ':':14} {size(value) if name == 'size_bytes' else value}")


def _print_json(models: Sequence[CachedModel]) -> None:
    print(msgspec.json.encode([_plain(model) for model in models]).decode())


def _plain(model: CachedModel) -> dict[str, Any]:
    found = {name: getattr(model, name) for name in _FIELDS}
    return found | {"path": str(model.path)}
