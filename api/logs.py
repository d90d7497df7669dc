"""The log's form: lines for people, or one JSON object a line for machines, both on stderr.

A record made while a request is answered carries its id (`X-Request-Id`), whoever writes it.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

current_request: ContextVar[str] = ContextVar("current_request", default="")
"""Id of the request that the running task answers."""


def set_up_logging(level: str, form: str = "text") -> None:
    """Our own log from `level` on, other packages' from warnings on, all on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("mlx_troupe").setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time (UTC), level, logger, message, request_id, the record's `facts`, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        found: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request.get():
            found["request_id"] = request_id
        found |= getattr(record, "facts", {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        # ASCII, so that no separator of Unicode can end the line for a reader that knows it.
        return json.dumps(found, default=str)
