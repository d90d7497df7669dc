"""What each agent wants to read to use this server: its file, its settings, and how it is started then. Pure.

Formats as the clients' documentation has them: code.claude.com (settings, LLM gateways), developers.openai.com/codex
(config reference), aider.chat (OpenAI compatible APIs), opencode.ai (providers), docs.continue.dev (config.yaml).
Keys: where a client can name an environment variable, its file names it; no key is ever written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .config_edit import ConfigEdit, JsonEdit, toml_edit, yaml_edit, yaml_item_edit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

KEY_VARIABLE = "MLX_TROUPE_CLIENT_KEY"
UNUSED = "unused"  # clients insist on a key even where the server wants none


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server to connect to.

    Attributes:
        url: without `/v1`.
        model: its name there.
        keyed: whether it wants a key.
    """

    url: str
    model: str
    keyed: bool


class ClientPlan:
    """One client's file and edit.

    Attributes:
        path: of its configuration.
        edit: of that.
        run: the command to start it with.
        advice: what else it needs; "" for nothing.
    """

    def __init__(self, path: Path, edit: ConfigEdit, run: str, advice: str = "") -> None:
        self.path = path
        self.edit = edit
        self.run = run
        self.advice = advice


def claude_code(target: Target, environment: Mapping[str, str]) -> ClientPlan:
    """`~/.claude/settings.json`: all of its model names lead to the one that is served."""
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))
    values: dict[tuple[str, ...], str] = {("env", name): target.model for name in names}
    values["env", "ANTHROPIC_BASE_URL"] = target.url
    if target.keyed:
        values["apiKeyHelper",] = f"printenv {KEY_VARIABLE}"
    else:
        values["env", "ANTHROPIC_AUTH_TOKEN"] = UNUSED
    folder = _folder(environment, "CLAUDE_CONFIG_DIR", ".claude")
    return ClientPlan(folder / "settings.json", JsonEdit(values), "claude", _export(target))


def codex(target: Target, environment: Mapping[str, str]) -> ClientPlan:
    """`~/.codex/config.toml`: a provider of its own, made the default."""
    values = {"name": "mlx-troupe", "base_url": f"{target.url}/v1", "wire_api": "responses"}
    if target.keyed:
        values["env_key"] = KEY_VARIABLE
    top = {"model": target.model, "model_provider": "mlx_troupe"}
    path = _folder(environment, "CODEX_HOME", ".codex") / "config.toml"
    return ClientPlan(path, toml_edit(top, ("model_providers", "mlx_troupe"), values), "codex", _export(target))


def aider(target: Target, environment: Mapping[str, str]) -> ClientPlan:
    """`~/.aider.conf.yml`."""
    values = {"openai-api-base": f"{target.url}/v1", "model": f"openai/{target.model}"}
    if not target.keyed:
        values["openai-api-key"] = UNUSED
    advice = f"export AIDER_OPENAI_API_KEY=${KEY_VARIABLE}" if target.keyed else ""
    return ClientPlan(_home(environment) / ".aider.conf.yml", yaml_edit(values), "aider", advice)


def opencode(target: Target, environment: Mapping[str, str]) -> ClientPlan:
    """`~/.config/opencode/opencode.json`: a provider of its own, made the default."""
    key = f"{{env:{KEY_VARIABLE}}}" if target.keyed else UNUSED
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-troupe",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": key},
        "models": {target.model: {"name": target.model}},
    }
    values = {("provider", "mlx-troupe"): provider, ("model",): f"mlx-troupe/{target.model}"}
    folder = _folder(environment, "XDG_CONFIG_HOME", ".config") / "opencode"
    return ClientPlan(folder / "opencode.json", JsonEdit(values), "opencode", _export(target))


def continue_dev(target: Target, environment: Mapping[str, str]) -> ClientPlan:
    """`~/.continue/config.yaml`: the first of its models."""
    key = f"${{{{ secrets.{KEY_VARIABLE} }}}}" if target.keyed else UNUSED
    item = {"name": "mlx-troupe", "provider": "openai", "model": target.model, "apiBase": f"{target.url}/v1"}
    roles = ["chat", "edit", "apply"]
    root = {"name": "My models", "version": "0.0.1", "schema": "v1"}
    edit = yaml_item_edit("models", item | {"apiKey": key, "roles": roles}, root)
    path = _folder(environment, "CONTINUE_GLOBAL_DIR", ".continue") / "config.yaml"
    advice = f"put {KEY_VARIABLE}=... into {path.parent / '.env'}" if target.keyed else ""
    return ClientPlan(path, edit, "cn, or the Continue extension", advice)


CLIENTS: dict[str, Callable[[Target, Mapping[str, str]], ClientPlan]] = {
    "claude-code": claude_code,
    "codex": codex,
    "aider": aider,
    "opencode": opencode,
    "continue": continue_dev,
}


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME") or Path.home())


def _folder(environment: Mapping[str, str], variable: str, usual: str) -> Path:
    return Path(environment.get(variable) or _home(environment) / usual)


def _export(target: Target) -> str:
    return f"export {KEY_VARIABLE}=... with your key" if target.keyed else ""
