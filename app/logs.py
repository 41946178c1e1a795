"""Log lines: JSON for machines, one readable line for people; each names its request and worker if it has one.

No line holds a body, a header, a query or a secret: none is given to the log.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Literal

import orjson

Format = Literal["auto", "json", "text"]
Style = tuple[str, Format]

AUDIT = "anychip.audit"

DOWNLOADS = "anychip.downloads"
"""Name of the logger of models.download, which says how far downloads are."""
_WARN_ALONE = "httpx", "httpcore", "httpx2", "httpcore2", "onnx_ir"
"""Loggers that say too much: those of HTTP libraries whole addresses with passwords, that of ONNX each constant."""

request_id: ContextVar[str] = ContextVar("anychip_request_id", default="")
"""Request that this task serves; lines about another one say so with `extra={"request_id": …}`."""
trace_id: ContextVar[str] = ContextVar("anychip_trace_id", default="")
"""Trace that this task belongs to, if it is recorded."""


def configure(level: str, form: Format) -> None:
    """Log to stderr; `auto` is readable on a terminal and JSON elsewhere. Replaces an earlier configuration."""
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # It warns of each strange byte that a client sends; the client is told, and must not fill the log.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    for name in _WARN_ALONE:
        logging.getLogger(name).setLevel(logging.WARNING)
    # The audit is for machines, in any form of the log, and no level silences it.
    audit = logging.getLogger(AUDIT)
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonFormatter())
    audit.handlers[:] = [lines]
    audit.propagate = False
    audit.setLevel(logging.INFO)


def say_downloads() -> None:
    """Write how far downloads are to stderr, for a command that has no log: nothing is silent for long."""
    lines = logging.getLogger(DOWNLOADS)
    lines.handlers[:] = [logging.StreamHandler()]
    lines.propagate = False
    lines.setLevel(logging.INFO)


def _marks(record: logging.LogRecord) -> dict[str, str]:
    process = multiprocessing.current_process()
    marks = {
        "request_id": getattr(record, "request_id", "") or request_id.get(),
        "trace_id": getattr(record, "trace_id", "") or trace_id.get(),
        "worker": getattr(record, "worker", "") or ("" if process.name == "MainProcess" else process.name),
    }
    return {name: mark for name, mark in marks.items() if mark}


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object a line; a traceback is in `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, as `logging.Formatter.format`."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_marks(record),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def printable(text: str) -> str:
    """Escape characters that end a line or move a terminal's cursor: clients choose paths and names of files."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class TextFormatter(logging.Formatter):
    """Formatter of time, level, logger, message, and the line's marks in brackets."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Format a message, as `logging.Formatter.formatMessage`."""
        marks = {**_marks(record), **getattr(record, "fields", {})}
        about = " ".join(f"{name}={mark}" for name, mark in marks.items())
        return printable(super().formatMessage(record) + (f" [{about}]" if about else ""))
