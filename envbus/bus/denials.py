"""What NATS denied to this connection's user; it tells of a denial only on the side.

Ends the requests that wait on a denied subject, and logs what nobody else would tell:
once what works without, and one line in a while for all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envbus.bus.inbox import INBOX_PREFIXES
from envbus.errors import BusPermissionError
from envbus.notices import Notices

Action = Literal["publish", "subscribe"]
PUBLISH_COUNTS_S = 5.0
"""How long a denied publish counts: NATS may have been told to allow it, which only the next one shows."""
MAX_KEPT = 1_000
"""Denials remembered."""
_DENIED = "NATS denied this user to "
_REMEDY = "; give it that permission"
_DENIAL = re.compile(
    r'permissions violation for (?P<action>publish|subscription) to "(?P<subject>[^"]*)"'
    r'(?: using queue "(?P<queue>[^"]*)")?',
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Denial:
    """One thing that this user may not do."""

    action: Action
    subject: str
    queue: str = ""

    def __str__(self) -> str:
        queue = f" in queue group {self.queue!r}" if self.queue else ""
        return f"{_DENIED}{self.action} to {self.subject!r}{queue}{_REMEDY}"


def told_together(texts: Sequence[str]) -> str:
    """Return the texts of several denials as one."""
    if len(texts) == 1:
        return texts[0]
    *others, last = [text.removeprefix(_DENIED).partition(_REMEDY)[0] for text in texts]
    return f"{_DENIED}{', '.join(others)} and {last}; give it these permissions, or connect as a user that has them"


class Denials:
    """The denials of one connection.

    Args:
        inbox: The connection's inbox subject: a denial of it has a remedy of its own.
        log: Where they are told.
    """

    def __init__(self, inbox: str, log: logging.Logger) -> None:
        self._inbox = inbox
        self._log = log
        self._notices = Notices(log)
        self._texts: OrderedDict[tuple[Action, str], str] = OrderedDict()
        self._published_at: dict[str, float] = {}
        self._optional: dict[tuple[Action, str], str] = {}
        self._told: set[str] = set()
        self._asking: dict[str, set[asyncio.Future[Any]]] = {}

    @property
    def has_published(self) -> bool:
        """Whether one of them is to publish."""
        return bool(self._published_at)

    def note(self, error: str) -> Denial | None:
        """Take in an error text of the client library; returns the denial if it is one."""
        found = _DENIAL.search(error)
        if found is None:
            return None
        action: Action = "publish" if found["action"].lower() == "publish" else "subscribe"
        denial = Denial(action, found["subject"], found["queue"] or "")
        text = str(denial)
        if self.is_inbox(denial.subject):
            text += ", or set the inbox prefix that it may use (inbox_prefix)"
        if not self._is_answer(denial):
            self._keep(denial, text)
        if not self._end_requests(denial, text):
            self._tell(denial, text)
        return denial

    def _keep(self, denial: Denial, text: str) -> None:
        self._texts[denial.action, denial.subject] = text
        if denial.action == "publish":
            self._published_at[denial.subject] = time.monotonic()
        if len(self._texts) > MAX_KEPT:
            self._forget(*next(iter(self._texts)))

    def _forget(self, action: Action, subject: str) -> None:
        del self._texts[action, subject]
        if action == "publish":
            del self._published_at[subject]

    def _end_requests(self, denial: Denial, text: str) -> bool:
        """Those that wait for an answer are told by their error."""
        asking = self._asking.get(denial.subject, ()) if denial.action == "publish" else ()
        for answer in asking:
            if not answer.done():
                answer.set_exception(BusPermissionError(text))
        return bool(asking)

    def _tell(self, denial: Denial, text: str) -> None:
        without = self._optional.get((denial.action, denial.subject))
        now = time.monotonic()
        if without is not None:
            if without not in self._told:
                self._told.add(without)
                self._log.warning("%s; without it %s", text, without)
        elif denial.action == "publish" and self.is_inbox(denial.subject):
            self._log.debug("%s", text)  # only the connection's own checks go there, and a denial answers them as well
        elif self._is_answer(denial):
            text = (
                f"an answer to {denial.subject!r} was denied: this user may not publish there, or not any more as "
                "allow_responses ends by max, expires or a reconnect; a client of the job protocol asks again"
            )
            self._notices.note("answer denied", text, now)
        else:
            self._notices.note(f"{denial.action} {denial.subject}"[:200], text, now, level=logging.ERROR)

    def _is_answer(self, denial: Denial) -> bool:
        """Nobody asks about these afterwards: each goes to another subject, and strangers choose those of a server."""
        return denial.action == "publish" and (
            denial.subject.startswith(INBOX_PREFIXES) or self.is_inbox(denial.subject)
        )

    def optional(self, action: Action, subject: str, without: str) -> None:
        """Say what is missed if this is denied: then that is one warning, and no error."""
        self._optional[action, subject] = without

    def is_inbox(self, subject: str) -> bool:
        """Whether a denied subject is the connection's own inbox."""
        return subject.startswith(self._inbox)

    def of(self, action: Action, subject: str) -> str | None:
        """Return what to say of a subject, if it was denied; to publish: lately."""
        if action == "publish" and time.monotonic() - self._published_at.get(subject, 0.0) >= PUBLISH_COUNTS_S:
            return None
        return self._texts.get((action, subject))

    @contextlib.contextmanager
    def ending(self, answer: asyncio.Future[Any], subject: str) -> Iterator[None]:
        """End a request with BusPermissionError as soon as its subject is denied."""
        asking = self._asking.setdefault(subject, set())
        asking.add(answer)
        try:
            yield
        finally:
            asking.discard(answer)
            if not asking and self._asking.get(subject) is asking:
                del self._asking[subject]

    def clear(self) -> None:
        """Forget all: another connection may have other permissions."""
        self._texts.clear()
        self._published_at.clear()

    def tick(self) -> None:
        """Forget what counts no more, and log the sums of what was not logged line by line."""
        now = time.monotonic()
        for subject in [subject for subject, at in self._published_at.items() if now - at >= PUBLISH_COUNTS_S]:
            self._forget("publish", subject)
        self._notices.tick(now)

    def close(self) -> None:
        """Log what is left."""
        self._notices.close(time.monotonic())
