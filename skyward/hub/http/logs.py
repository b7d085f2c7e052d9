"""Log of a server: one JSON object a line, or text for a terminal. Neither ever holds a token."""

from __future__ import annotations

import json
import logging
import re
import sys
import time

from ...errors import UsageError
from ..model.product import TOKEN_PREFIX

LEVELS = ("debug", "info", "warning", "error")
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_TOKEN = re.compile(rf"{TOKEN_PREFIX}([0-9a-f]+)_[0-9a-f]{{16,}}")


def without_tokens(text: str) -> str:
    """Cut the secret out of each token in a text."""
    return _TOKEN.sub(rf"{TOKEN_PREFIX}\1_***", text)


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON, so that no text in it can forge a second line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _KNOWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return without_tokens(json.dumps(line, default=str))


class TextLines(logging.Formatter):
    """Writes a record for a person."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return without_tokens(super().format(record))


def install_logs(level: str, style: str) -> None:
    """Send the logs of the hub and of its server to stderr.

    Raises:
        UsageError: There is no such level or format.
    """
    if level.lower() not in LEVELS:
        raise UsageError(f"logging.level={level!r}: unknown; choose one of {', '.join(LEVELS)}")
    if style not in ("json", "text"):
        raise UsageError(f"logging.format={style!r}: unknown; choose json or text")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    for name in ("skyward.hub", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
