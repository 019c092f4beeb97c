"""Log lines about what may happen any number of times: the first of a kind at once, then one sum per window.

Owns no clock: its user passes the time, calls tick() now and then and close() at the end, so that no sum is lost.
What is noted must be counted elsewhere, too, if the number matters to programs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EVERY_S = 10.0
"""Between two lines of one kind."""


@dataclass(slots=True)
class _Window:
    since: float
    more: int = 0
    level: int = logging.WARNING
    last: str = ""


class Notices:
    """Warnings of one owner, at most one line per kind and window.

    Args:
        log: Where they go.
        fields: Who writes them; extra fields of every line.
    """

    def __init__(self, log: logging.Logger, fields: Mapping[str, Any] | None = None) -> None:
        self._log = log
        self._fields = dict(fields or {})
        self._windows: dict[str, _Window] = {}

    def note(
        self,
        kind: str,
        text: str,
        now: float,
        *,
        level: int = logging.WARNING,
        error: BaseException | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Something happened; ``kind`` is one of a few words, never a stranger's.

        Args:
            error: Whose traceback is logged, too.
            fields: Extra fields of the line. What is about one job is written at DEBUG if it only counts here.
        """
        level = logging.ERROR if error is not None else level
        if (window := self._windows.get(kind)) is not None and now - window.since >= EVERY_S:
            self._sum_up(kind, window, now)
            window = self._windows.get(kind)
        if window is None:
            self._windows[kind] = _Window(now)
            self._log.log(level, "%s", text, exc_info=error, extra={**(fields or {}), **self._fields})
            return
        window.more += 1
        window.level, window.last = level, text
        if fields is not None and "job" in fields:
            self._log.debug("%s", text, extra={**fields, **self._fields})

    def tick(self, now: float) -> None:
        """Log what came meanwhile, as one line per kind."""
        for kind, window in list(self._windows.items()):
            if now - window.since >= EVERY_S:
                self._sum_up(kind, window, now)

    def close(self, now: float) -> None:
        """Log what has not been logged yet."""
        for kind, window in list(self._windows.items()):
            self._sum_up(kind, window, now)
        self._windows.clear()

    def _sum_up(self, kind: str, window: _Window, now: float) -> None:
        del self._windows[kind]
        if window.more:
            text = "%s" if window.more == 1 else f"%s (the last of {window.more:,} such in {now - window.since:.0f} s)"
            self._log.log(window.level, text, window.last, extra={"count": window.more, **self._fields})
            self._windows[kind] = _Window(now)
