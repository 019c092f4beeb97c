"""The waiting line of one server: which client gets the next free slot.

Pure. Higher priority first, then the client that was served longest ago, so a
client with ten jobs does not wait behind another's thousand.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

MAX_WAITERS = 4096
"""Clients in one line; who finds it full says so again and comes in when there is room."""
NOBODY: frozenset[str] = frozenset()


@dataclass(slots=True)
class Waiter:
    """A client that said it has jobs waiting."""

    client: str
    inbox: str
    jobs: int
    priority: int
    heard_at: float
    served: int
    """Position of its last grant (or of its arrival) in the order of all of them."""


class Line:
    """Clients that wait for a slot here."""

    def __init__(self) -> None:
        self._waiters: dict[str, Waiter] = {}
        self._turn = 0
        self.turned_away = 0
        """Times that a client found the line full."""

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def jobs(self) -> int:
        """Jobs that the waiting clients said they have. The same job may wait at every server."""
        return sum(waiter.jobs for waiter in self._waiters.values())

    def longest(self, count: int) -> dict[str, int]:
        """Return the clients with the most waiting jobs, at most ``count``, and how many each has."""
        waiters = heapq.nlargest(count, self._waiters.values(), key=lambda waiter: waiter.jobs)
        return {waiter.client: waiter.jobs for waiter in waiters}

    def put(self, client: str, *, inbox: str, jobs: int, priority: int, now: float) -> None:
        """Note what a client said; 0 jobs takes it off the line. It keeps its place if it has one."""
        if jobs <= 0:
            self._waiters.pop(client, None)
            return
        waiter = self._waiters.get(client)
        if waiter is None:
            if len(self._waiters) >= MAX_WAITERS:
                self.turned_away += 1
                return
            self._turn += 1
            self._waiters[client] = Waiter(client, inbox, jobs, priority, now, self._turn)
            return
        waiter.inbox, waiter.jobs, waiter.priority, waiter.heard_at = inbox, jobs, priority, now

    def remove(self, client: str) -> None:
        """Take a client off the line."""
        self._waiters.pop(client, None)

    def clear(self) -> None:
        """Send everybody away."""
        self._waiters.clear()

    def has_turn(self, *, without: AbstractSet[str] = NOBODY) -> bool:
        """Whether somebody waits, these clients left out."""
        return next(self._in_line(without), None) is not None

    def next(self, *, without: AbstractSet[str] = NOBODY) -> tuple[str, str] | None:
        """Return ``(client, inbox)`` of whose turn it is, these left out, and count one of its jobs as served."""
        waiter = min(self._in_line(without), key=lambda w: (-w.priority, w.served), default=None)
        if waiter is None:
            return None
        self._turn += 1
        waiter.served = self._turn
        waiter.jobs -= 1
        if waiter.jobs == 0:
            del self._waiters[waiter.client]
        return waiter.client, waiter.inbox

    def forget_silent(self, before: float, *, only: str | None = None) -> None:
        """Take off the clients, or only this one, that were last heard before this time."""
        for waiter in list(self._waiters.values()):
            if waiter.heard_at < before and only in (None, waiter.client):
                del self._waiters[waiter.client]

    def _in_line(self, without: AbstractSet[str]) -> Iterator[Waiter]:
        return (waiter for waiter in self._waiters.values() if waiter.client not in without)
