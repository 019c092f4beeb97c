"""The one way to log what happens to a job: a line with the job's id and who writes it, as text and as fields.

The steps of a job's life are DEBUG. What goes wrong with jobs is WARNING, rate-limited over all jobs of the owner;
at DEBUG each job's own line is there nevertheless.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from envbus.notices import Notices


class JobLog:
    """The lines of one owner of jobs, on one thread.

    Args:
        log: Where they go.
        who: Fields of every line: ``env``, and ``client`` or ``server``.
    """

    def __init__(self, log: logging.Logger, **who: str) -> None:
        self._log = log
        self._who = who
        self.notices = Notices(log, who)

    @property
    def is_detailed(self) -> bool:
        """Whether steps are written: ask before working out costly facts."""
        return self._log.isEnabledFor(logging.DEBUG)

    def step(self, what: str, job: str, **facts: Any) -> None:
        """A step of a job's life. Costs nearly nothing while DEBUG is off."""
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug("%s", what, extra={"job": job, **_known(facts), **self._who})

    def trouble(self, what: str, job: str, why: str, *, level: int = logging.WARNING, **facts: Any) -> None:
        """Something went wrong with a job.

        Args:
            what: One of a few fixed texts: the kind by which such lines are limited.
            why: The rest of the line.
        """
        fields = {"job": job, **_known(facts)}
        self.notices.note(what, f"{what}: {why}", time.monotonic(), level=level, fields=fields)

    def tick(self) -> None:
        """Write the sums that are due."""
        self.notices.tick(time.monotonic())

    def close(self) -> None:
        """Write the sums that are left."""
        self.notices.close(time.monotonic())


def counted(counts: Mapping[str, int], words: Mapping[str, str]) -> str:
    """Return what was counted, in words: ``12,000 jobs, 3 sent again``; what is 0 is left out.

    Args:
        counts: By name.
        words: What to call each, in the order in which they are named; ``{s}`` where a plural has an s.
    """
    found = ((counts.get(name, 0), text) for name, text in words.items())
    return ", ".join(f"{count:,} {text.replace('{s}', 's' * (count != 1))}" for count, text in found if count)


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
