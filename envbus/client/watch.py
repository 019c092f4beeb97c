"""The caller's end of a job's progress: calls back on the caller's loop, and tells when it has."""

from __future__ import annotations

import logging
from collections.abc import Callable

from envbus.bus.codec import Limits, decode_map
from envbus.client.progress import Report
from envbus.errors import DecodeError
from envbus.evaluation.callbacks import call_safely
from envbus.settings import MAX_REPORT_BYTES
from envbus.types import OnProgress, RolloutProgress

log = logging.getLogger("envbus.client")

_LIMITS = Limits(max_bytes=MAX_REPORT_BYTES)


class Watch:
    """The progress of one call. On the caller's loop.

    Args:
        taken: Called with each report that the caller has had.
    """

    def __init__(self, on_progress: OnProgress, taken: Callable[[Report], None]) -> None:
        self._on_progress = on_progress
        self._taken = taken
        self._is_over = False

    def report(self, report: Report) -> None:
        """Call back, unless the call has ended."""
        if self._is_over:
            return
        try:
            data = decode_map(report.body, limits=_LIMITS)
        except DecodeError as error:
            log.warning("a progress report of server %s cannot be read: %s", report.server[:8], error)
        else:
            call_safely(self._on_progress, RolloutProgress(report.attempt, report.number, data))
        self._taken(report)

    def end(self) -> None:
        """The call has ended: no callback comes any more."""
        self._is_over = True
