"""A server that starts with the machine: a systemd user unit on Linux, a launchd agent on macOS. Pure.

Both run as the user who installs them, restart after a failure, and get their settings as arguments only: neither sees
the shell's environment, and API keys come from a file.
"""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .options import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

MARK = "Made by mlx-troupe service install"
RESTART_DELAY_S = 5


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What installing, removing and asking for a service takes.

    Attributes:
        path: of the service manager's file.
        content: of that file.
        start: commands that make the manager know and run it.
        stop: commands that end it, to be run before the file goes.
        forget: commands to be run after it is gone.
        status: the command that says whether it runs; its exit code is 0 when it does.
        advice: what the user may want to do besides.
    """

    path: Path
    content: bytes
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    forget: tuple[tuple[str, ...], ...]
    status: tuple[str, ...]
    advice: str


def service_plan(
    platform: str, name: str, command: Sequence[str], *, home: Path, config_home: Path, user_id: int, stop_s: float
) -> ServicePlan:
    """The plan for a platform, as `sys.platform` names it. Raises SettingsError for others and for odd characters.

    Args:
        name: of the service.
        command: absolute path of a program, and its arguments.
        config_home: where systemd's user units are, below.
        stop_s: how long the server may take to end.
    """
    for argument in command:
        if not argument.isprintable():
            raise SettingsError(f"{argument!r} holds a character that a service file cannot")
    if platform == "darwin":
        return _launchd(name, command, home, user_id, stop_s)
    if platform == "linux":
        return _systemd(name, command, config_home, stop_s)
    raise SettingsError(f"no services on {platform}: systemd and launchd are what this command knows")


def _systemd(name: str, command: Sequence[str], config_home: Path, stop_s: float) -> ServicePlan:
    unit = f"{name}.service"
    systemctl = ("systemctl", "--user")
    return ServicePlan(
        path=config_home / "systemd" / "user" / unit,
        content=systemd_unit(command, stop_s).encode(),
        start=((*systemctl, "daemon-reload"), (*systemctl, "enable", unit), (*systemctl, "restart", unit)),
        stop=((*systemctl, "disable", "--now", unit),),
        forget=((*systemctl, "daemon-reload"),),
        status=(*systemctl, "status", "--no-pager", unit),
        advice=f"Log: journalctl --user -u {unit}. To run it without being logged in: loginctl enable-linger",
    )


def systemd_unit(command: Sequence[str], stop_s: float) -> str:
    """A user unit's text (systemd.service(5), systemd.exec(5))."""
    return f"""\
# {MARK}
[Unit]
Description=mlx-troupe, a language model server
After=network.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
ExecStart={" ".join(map(systemd_quoted, command))}
Restart=on-failure
RestartSec={RESTART_DELAY_S}
TimeoutStopSec={stop_s:g}
NoNewPrivileges=yes
UMask=0077
LimitNOFILE=65536

[Install]
WantedBy=default.target
"""


def systemd_quoted(argument: str) -> str:
    """One word of `ExecStart`: in double quotes, with C's escapes, and without specifiers or variables
    (systemd.syntax(7), "Quoting"; systemd.unit(5), "Specifiers"; systemd.service(5), "Command lines")."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _launchd(name: str, command: Sequence[str], home: Path, user_id: int, stop_s: float) -> ServicePlan:
    label = f"org.{name}"
    path = home / "Library" / "LaunchAgents" / f"{label}.plist"
    log = home / "Library" / "Logs" / f"{name}.log"
    domain = f"gui/{user_id}"
    return ServicePlan(
        path=path,
        content=launchd_plist(label, command, log, stop_s),
        start=(("launchctl", "bootstrap", domain, str(path)),),
        stop=(("launchctl", "bootout", f"{domain}/{label}"),),
        forget=(),
        status=("launchctl", "print", f"{domain}/{label}"),
        advice=f"Log: {log}",
    )


def launchd_plist(label: str, command: Sequence[str], log: Path, stop_s: float) -> bytes:
    """A launch agent's property list (launchd.plist(5))."""
    facts = {
        "Label": label,
        "Comment": MARK,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_DELAY_S,
        "ExitTimeOut": round(stop_s),
        "ProcessType": "Interactive",  # or launchd lowers its share of CPU and disk
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": 65536},
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    return plistlib.dumps(facts, sort_keys=False)
