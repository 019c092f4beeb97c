"""The outcomes that a server holds until their clients say that they have them: who holds how much, what may leave.

Pure: events and a clock value in, answers out. The budget is back-pressure: it
drops nothing that a client may still need. It says when the server takes no more
work, and from whom; what was sent and is asked for no more leaves while it is short.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile

MAX_HELD = 10_000
"""Outcomes held at once, however small: each is looked at while memory is short."""


@dataclass(slots=True)
class Held:
    """One outcome.

    Attributes:
        since: When it was there.
        sent: It went to the client as a whole, though that has not said so.
        quiet_since: When it was last sent, or asked for.
    """

    client: str
    size_bytes: int
    is_failure: bool
    since: float
    quiet_since: float
    sent: bool = False
    parts_sent: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Share:
    """What one client's outcomes take."""

    count: int = 0
    size_bytes: int = 0


class Holdings:
    """The held outcomes of one server.

    Args:
        max_bytes: At this the server takes no more work; from one client, at half of it.
        hold_s: How long an outcome is held for a client that does not collect it.
        quiet_s: While memory is short, one that was sent leaves when nobody has asked for it for this long.
    """

    def __init__(self, *, max_bytes: int, hold_s: float, quiet_s: float) -> None:
        self._max_bytes = max_bytes
        self._hold_s = hold_s
        self._quiet_s = quiet_s
        self._held: OrderedDict[str, Held] = OrderedDict()
        self._shares: dict[str, Share] = {}
        self._heavy: set[str] = set()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._held

    @property
    def is_full(self) -> bool:
        """Whether the budget is used up."""
        return self.size_bytes >= self._max_bytes or len(self._held) >= MAX_HELD

    @property
    def heavy_clients(self) -> frozenset[str]:
        """Clients whose outcomes take half of the budget or more."""
        return frozenset(self._heavy)

    def put(self, job_id: str, client: str, *, size_bytes: int, is_failure: bool, now: float) -> None:
        """Hold an outcome; in place of the one that is held of this job, if there is one."""
        self.drop(job_id)
        self._held[job_id] = Held(client, size_bytes, is_failure, since=now, quiet_since=now)
        self.size_bytes += size_bytes
        share = self._shares.setdefault(client, Share())
        share.count += 1
        share.size_bytes += size_bytes
        self._weigh(client, share)

    def drop(self, job_id: str) -> None:
        """Hold it no more. Harmless if it is not held."""
        held = self._held.pop(job_id, None)
        if held is None:
            return
        self.size_bytes -= held.size_bytes
        share = self._shares[held.client]
        share.count -= 1
        share.size_bytes -= held.size_bytes
        self._weigh(held.client, share)

    def sent(self, job_id: str, now: float) -> None:
        """It went to its client on one message."""
        if (held := self._held.get(job_id)) is not None:
            held.sent, held.quiet_since = True, now

    def part_sent(self, job_id: str, index: int, *, of: int, now: float) -> None:
        """One of its parts went to its client."""
        if (held := self._held.get(job_id)) is not None:
            held.parts_sent.add(index)
            held.sent, held.quiet_since = len(held.parts_sent) == of, now

    def asked(self, job_id: str, now: float) -> None:
        """Its client asks about the job, so it may not have the outcome."""
        if (held := self._held.get(job_id)) is not None:
            held.quiet_since = now

    def shift_clocks(self, outage_s: float) -> None:
        """This server was cut off: for that long nobody could have asked."""
        for held in self._held.values():
            held.since += outage_s
            held.quiet_since += outage_s

    def overdue(self, now: float) -> list[tuple[str, bool]]:
        """Return what was not collected in time, oldest first, and whether each is a failure."""
        oldest_first = takewhile(lambda item: now - item[1].since >= self._hold_s, self._held.items())
        return [(job_id, held.is_failure) for job_id, held in oldest_first]

    def let_go(self, now: float) -> list[str]:
        """While memory is short, drop what was sent and is asked for no more; returns the jobs, oldest first."""
        if not self.is_full and not self._heavy:
            return []
        return [job_id for job_id, held in list(self._held.items()) if self._is_let_go(job_id, held, now)]

    def _is_let_go(self, job_id: str, held: Held, now: float) -> bool:
        is_short = self.is_full or held.client in self._heavy
        if not is_short or not held.sent or now - held.quiet_since < self._quiet_s:
            return False
        self.drop(job_id)
        return True

    def _weigh(self, client: str, share: Share) -> None:
        if 2 * share.size_bytes >= self._max_bytes or 2 * share.count >= MAX_HELD:
            self._heavy.add(client)
        else:
            self._heavy.discard(client)
        if not share.count:
            del self._shares[client]
