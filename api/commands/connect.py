"""`mlx-troupe connect`: lets an agent use this server, by its own configuration."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..clients import CLIENTS, KEY_VARIABLE, ClientPlan, Target
from ..edits import EditRefused, keep_copy, read_text, remove_file, replace_file
from ..options import SettingsError
from ..terminal import note
from .common import FAILURE, OK, Invocation

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

NAME = "connect"
HELP = "let Claude Code, Codex, aider, opencode or Continue use this server"

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
MAX_NAME_CHARACTERS = 200
BACKUP = ".before-mlx-troupe"


def add(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.add_argument("client", choices=CLIENTS, metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument(
        "--model", dest="target_model", metavar="NAME", help="of the model there (default: what the server says)"
    )
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--write", action="store_true", help="edit the client's file; a copy of it is kept beside it")
    does.add_argument("--undo", action="store_true", help="take our settings out of the file again")


def run(invocation: Invocation) -> int:
    """Print, write or undo."""
    arguments = invocation.arguments
    make = CLIENTS[arguments.client]
    try:
        if arguments.undo:
            return _undo(make(Target(url="http://x", model="x", keyed=False), invocation.environment), invocation)
        plan = make(_target(invocation), invocation.environment)
        return _write(plan, arguments.client) if arguments.write else _show(plan)
    except EditRefused as error:
        note(f"mlx-troupe: {error}")
        return FAILURE


def _target(invocation: Invocation) -> Target:
    url = _checked_url(invocation.arguments.url)
    status, answer = _models(url, invocation.environment.get(KEY_VARIABLE, ""))
    model = invocation.arguments.target_model if invocation.arguments.target_model is not None else _served(answer)
    if model is None:
        why = {0: "nobody answers there", 401: f"it wants a key; set {KEY_VARIABLE}"}.get(
            status, f"it answers {status}"
        )
        raise SettingsError(f"{url}: {why}; start the server first, or name the model with --model")
    if not model.isprintable() or not 0 < len(model) <= MAX_NAME_CHARACTERS:
        raise SettingsError("the model's name cannot be used")
    keyed = status == 401 or (status == 200 and _models(url, "")[0] == 401)
    return Target(url=url, model=model, keyed=keyed or (status == 0 and KEY_VARIABLE in invocation.environment))


def _checked_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not text.isprintable() or " " in text or parts.username or parts.query or parts.fragment:
        raise SettingsError(f"--url {text[:200]!r}: http://HOST:PORT, without user, query or fragment")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A server that sends the key elsewhere does not get it."""

    def redirect_request(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        return None


def _models(url: str, key: str) -> tuple[int, bytes]:
    """Status and body of the server's list of models; (0, b"") when nobody answers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, b""
    except (OSError, ValueError):
        return 0, b""


def _served(answer: bytes) -> str | None:
    try:
        name = json.loads(answer)["data"][0]["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _show(plan: ClientPlan) -> int:
    print(f"# {plan.path}")
    print(plan.edit.apply(None), end="")
    note("nothing was written; --write does it")
    _note_rest(plan)
    return OK


def _write(plan: ClientPlan, client: str) -> int:
    text = read_text(plan.path)
    original = None if text is None else _without_ours(plan, text)
    backup = _backup(plan)
    try:
        new = plan.edit.apply(original)
    except EditRefused as error:
        raise EditRefused(f"{plan.path}: {error}; add this by hand:\n{plan.edit.apply(None)}") from None
    keep_copy(backup, (original or "").encode())
    replace_file(plan.path, new.encode(), mode=0o600)
    print(f"{plan.path}: written{'' if original is None else f'; the copy: {backup}'}")
    note(f"back: mlx-troupe connect {client} --undo")
    _note_rest(plan)
    return OK


def _undo(plan: ClientPlan, invocation: Invocation) -> int:
    text = read_text(plan.path)
    left = None if text is None else _without_ours(plan, text)
    if text is None or left == text:
        note(f"{plan.path}: holds nothing of mlx-troupe's")
        return FAILURE
    if left is None:
        remove_file(plan.path)
    else:
        replace_file(plan.path, left.encode())
    remove_file(_backup(plan))
    print(f"{plan.path}: {'removed' if left is None else 'as before'}")
    return OK


def _without_ours(plan: ClientPlan, text: str) -> str | None:
    """What the file would be if we had never written it: there is a copy if we did, an empty one of no file."""
    copy = read_text(_backup(plan))
    if copy is None:
        return text
    try:
        return plan.edit.undo(text, copy or None)
    except EditRefused as error:
        raise EditRefused(f"{plan.path}: {error}") from None


def _backup(plan: ClientPlan) -> Path:
    return plan.path.with_name(plan.path.name + BACKUP)


def _note_rest(plan: ClientPlan) -> None:
    if plan.advice:
        note(f"besides: {plan.advice}")
    note(f"then run: {plan.run}")
