"""Log lines about what strangers can bring about any number of times: the first of a kind at once, then sums.

Owns no clock: its user passes the time. What is noted must be counted elsewhere, too, if the number matters.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

EVERY_S = 10.0
"""Between two lines of one kind."""


@dataclass(slots=True)
class _Kind:
    logged_at: float
    more: int = 0
    last: str = ""


class Notices:
    """Warnings of one server, at most one line per kind and interval.

    Args:
        log: Where they go.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[str, _Kind] = {}

    def note(self, kind: str, text: str, now: float, *, error: Exception | None = None) -> None:
        """Something happened; ``kind`` is one of a few words, never a stranger's.

        Args:
            error: Whose traceback is logged, too.
        """
        seen = self._kinds.get(kind)
        if seen is None:
            self._kinds[kind] = _Kind(now)
            self._log.log(logging.WARNING if error is None else logging.ERROR, "%s", text, exc_info=error)
        else:
            seen.more += 1
            seen.last = text

    def tick(self, now: float) -> None:
        """Log what came meanwhile, as one line per kind."""
        for kind, seen in list(self._kinds.items()):
            if now - seen.logged_at < EVERY_S:
                continue
            if seen.more:
                self._log.warning("%s (and %d more such in %.0f s)", seen.last, seen.more - 1, now - seen.logged_at)
                self._kinds[kind] = _Kind(now)
            else:
                del self._kinds[kind]
