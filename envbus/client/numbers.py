"""What a client did and what went wrong, as numbers for its caller and in one line for the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from envbus.bus.connection import ConnectionStats
from envbus.job_log import counted

_JOB_COUNTS = {
    "jobs": "job{s}",
    "resent": "sent again",
    "unaccepted": "send{s} without an answer",
    "lost": "given up",
    "late_results": "late result{s} dropped",
    "late_failures": "late failure{s} dropped",
    "late_accepts": "late acceptance{s} stopped",
    "bad_messages": "bad message{s} dropped",
}
_CONNECTION_COUNTS = {
    "reconnects": "reconnect{s}",
    "rebuilds": "connection{s} made anew",
    "slow_consumers": "time{s} a slow consumer",
    "unsent": "message{s} not sent",
}


class ClientNumbers:
    """The numbers of one client.

    Args:
        counts: Counted by its session.
        connection: Of the connection, which may be shared and have a past.
    """

    def __init__(self, counts: Mapping[str, int], connection: ConnectionStats) -> None:
        self._counts = counts
        self._connection = connection
        self._before = replace(connection)

    def read(self) -> dict[str, float]:
        """Return all of them."""
        now, before = self._connection, self._before
        return {name: self._counts.get(name, 0) for name in _JOB_COUNTS} | {
            "reconnects": now.reconnects - before.reconnects,
            "rebuilds": now.rebuilds - before.rebuilds,
            "slow_consumers": now.slow_consumers - before.slow_consumers,
            "unsent": now.dropped - before.dropped,
            "outage_s": round(now.outage_s - before.outage_s, 3),
        }

    def trouble(self) -> str | None:
        """Say in one line what went wrong; None if nothing did."""
        numbers = self.read()
        if not any(value for name, value in numbers.items() if name != "jobs"):
            return None
        counts = {name: int(value) for name, value in numbers.items()}
        text = counted(counts, _JOB_COUNTS | _CONNECTION_COUNTS)
        return f"{text} ({numbers['outage_s']:.1f} s away)" if numbers["outage_s"] else text
