"""Sets up what the ``envbus`` loggers write, and where: console and file, as text or JSON lines.

Touches the ``envbus`` logger tree only, never the root logger.
"""

from __future__ import annotations

import json as json_format
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from envbus.errors import UsageError

_TAIL_BYTES = 65536
_PLAIN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
_SHORT_IDS = ("server", "client")
_SAID_IN_TEXT = ("count",)
"""Fields for programs only: the message of a sum says it."""
_SHORT_CHARS = 8
_installed: list[logging.Handler] = []


def setup_logging(
    level: str | int = "INFO",
    *,
    log_file: Path | str | None = None,
    json: bool = False,
    console: bool = True,
) -> None:
    """Send the logs of envbus to the console and a file. A second call replaces the first.

    Args:
        level: Least level that is written, e.g. ``"DEBUG"``.
        log_file: Appended to; missing folders are created. None for no file.
        json: Write one JSON object per line (time, level, logger, message and extra fields) instead of text.
        console: Write to stderr: coloured on a terminal, plain elsewhere.

    Raises:
        UsageError: The level is unknown or the file cannot be written.
    """
    handlers: list[logging.Handler] = []
    level_number = _level_number(level)
    if log_file is not None:
        handlers.append(_file_handler(Path(log_file), json))
    if console:
        handlers.append(_console_handler(json))
    logger = logging.getLogger("envbus")
    for old in _installed:
        logger.removeHandler(old)
        old.close()
    _installed[:] = handlers
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level_number)
    logger.propagate = False  # or a handler on the root logger would write each line again


def tail(path: Path | str, lines: int = 20) -> list[str]:
    """The last lines of a log file, for quoting; empty when there is no such file."""
    try:
        with Path(path).open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, size_bytes - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()[-lines:] if lines > 0 else []


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, exception, and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Render the record."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry |= {name: value for name, value in _extra_fields(record).items() if name not in entry}
        try:
            return json_format.dumps(entry, allow_nan=False, default=str)
        except (ValueError, TypeError):
            return json_format.dumps({str(name): str(value) for name, value in entry.items()})


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, and the record's extra fields as ``name=value``; ids of servers and clients cut."""

    def __init__(self, *, message_only: bool = False) -> None:
        super().__init__("%(message)s" if message_only else "%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: D102
        fields = {name: value for name, value in _extra_fields(record).items() if name not in _SAID_IN_TEXT}
        extra = "".join(f" {name}={_shown(name, value)}" for name, value in fields.items())
        first, end, rest = super().formatMessage(record).partition("\n")
        return first + extra + end + rest


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at the time, so displays and tests may redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None: ...


def _level_number(level: str | int) -> int:
    number = logging.getLevelNamesMapping().get(level.upper()) if isinstance(level, str) else level
    if number is None:
        raise UsageError(f"unknown log level {level!r}; use DEBUG, INFO, WARNING, ERROR or CRITICAL")
    return number


def _file_handler(path: Path, json: bool) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")
    except OSError as exc:
        raise UsageError(f"cannot write the log file {path}: {exc}; choose another path") from exc
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    return handler


def _console_handler(json: bool) -> logging.Handler:
    if json or not sys.stderr.isatty():
        handler: logging.Handler = _StderrHandler()
        handler.setFormatter(JsonFormatter() if json else TextFormatter())
        return handler
    from rich.console import Console  # not needed, and not loaded, away from a terminal
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
    handler.setFormatter(TextFormatter(message_only=True))
    return handler


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _PLAIN_FIELDS}


def _shown(name: str, value: Any) -> Any:
    return value[:_SHORT_CHARS] if name in _SHORT_IDS and isinstance(value, str) else value
