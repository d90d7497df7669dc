"""Models from the Hugging Face hub, through its own client and cache.

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` work as everywhere. Configuration files come
first and are checked, so that gigabytes of an unsafe or unsupported model are never fetched.
"""

from __future__ import annotations

import io
import logging
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from .errors import ModelDownloadFailed, ModelError, ModelNotFound
from .progress import Progress, Report, ignore
from .safety import check_configuration, check_folder

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
CONFIGURATION_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
ALL_FILES = [*CONFIGURATION_FILES, "model*.safetensors"]
SUB_FOLDERS = ["*/*"]
"""Other copies of the weights (ONNX, original checkpoints) stay on the hub."""
REACHABLE_TIMEOUT_S = 1.5


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form "owner/model"."""
    return HUB_ID.fullmatch(name) is not None


def is_offline() -> bool:
    """Whether the user keeps Hugging Face's client off the network (`HF_HUB_OFFLINE`)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_reachable(timeout_s: float = REACHABLE_TIMEOUT_S) -> bool:
    """Whether the hub answers within `timeout_s`, name look-up included. For start-up only."""
    answered = threading.Event()
    # A daemon thread, because the look-up of a host name cannot be given a time limit.
    threading.Thread(target=_probe, args=(timeout_s, answered), name="hub-probe", daemon=True).start()
    return answered.wait(timeout_s)


def _probe(timeout_s: float, answered: threading.Event) -> None:
    from huggingface_hub import constants

    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):
            answered.set()
    except (urllib.error.URLError, OSError, ValueError):
        return


def cached_snapshot(name: str, revision: str | None) -> Path:
    """The complete copy of `name` in the local cache; raises `ModelNotFound` without one."""
    from huggingface_hub import errors

    try:
        return _snapshot(name, revision, ALL_FILES, local_files_only=True)
    except (errors.LocalEntryNotFoundError, OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelNotFound(
            f"{name}{at} is not in the local Hugging Face cache (or not completely), and this start may not "
            f"download. Fetch it with: mlx-troupe models pull {name}"
        ) from error


def download_snapshot(name: str, revision: str | None, report: Report = ignore) -> Path:
    """Fetch what is missing of `name`, checked before the weights come; returns its folder.

    Raises `ModelNotFound`, `ModelDownloadFailed`, `UnsafeModel`, `UnsupportedModel`, `InvalidModel`.
    """
    from huggingface_hub import errors

    try:
        configuration = _snapshot(name, revision, CONFIGURATION_FILES, report=report)
        check_configuration(configuration)
        folder = _snapshot(name, configuration.name, ALL_FILES, report=report)
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelDownloadFailed(
            f"{name} is gated: accept its terms on its hub page, then set HF_TOKEN to your access token."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{name} has no revision {revision!r}. Check --revision.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The hub has no model {name}, or it is private: check the spelling, or set HF_TOKEN."
        ) from error
    except Exception as error:  # network, disk and HTTP libraries each raise their own
        raise ModelDownloadFailed(
            f"{name} could not be downloaded: {error}. Check the network, HF_ENDPOINT and free disk space, "
            "then try again; finished files are kept."
        ) from error
    check_folder(folder)
    return folder


def _snapshot(
    name: str,
    revision: str | None,
    patterns: list[str],
    *,
    local_files_only: bool = False,
    report: Report = ignore,
) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=SUB_FOLDERS,
            local_files_only=local_files_only,
            tqdm_class=_reporting_bar(f"download {name}", report),
        )
    )


def _reporting_bar(stage: str, report: Report) -> Any:
    """A progress bar class that reports bytes instead of drawing. It may be called on download threads."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class ReportingBar(tqdm):
        def __init__(self, *positional: Any, **settings: Any) -> None:
            settings.pop("name", None)
            super().__init__(*positional, **settings | {"file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B":
                report(Progress(stage, int(self.n), int(self.total) if self.total else None))
            return True

    return ReportingBar
