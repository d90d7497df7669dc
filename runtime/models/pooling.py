"""How an embedding model's folder says that its hidden states become a vector."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ..reading import Pooling

log = logging.getLogger(__name__)

SETTINGS = "1_Pooling/config.json"
"""Where sentence-transformers writes it."""


def pooling_of(folder: Path) -> Pooling:
    """What the folder says; "mean" when it says nothing, or something that is not done here."""
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "mean"
    asked = {name for name, value in settings.items() if value is True} if isinstance(settings, dict) else set()
    if "pooling_mode_lasttoken" in asked:
        return "last"
    if "pooling_mode_mean_tokens" not in asked:
        log.warning("%s: pooling of its own kind (%s) is not done; the mean is taken", folder, ", ".join(sorted(asked)))
    return "mean"
