"""The progress of one job as it comes in: put in order, joined to whole reports, each given out once per attempt.

Pure. A job may run on two servers at once, when one of them stalls: each is a stream of its own. Invariant: what is
kept and not yet taken is bounded; what is dropped for that is not "here", so its server sends it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from envbus.settings import MAX_REPORT_BYTES

MAX_KEPT_BYTES = 4 * 2**20
"""Of one stream: reports that the caller has not taken, and messages that came before an earlier one."""
KEPT_OVERHEAD_BYTES = 256
"""What keeping one of them takes beside its bytes."""


class EndlessReportError(Exception):
    """A server sends a report that is larger than any may be."""


@dataclass(frozen=True, slots=True)
class Report:
    """One whole report, for the caller.

    Attributes:
        seq: The number of its last message.
    """

    server: str
    attempt: int
    number: int
    seq: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a server's progress; see envbus.bus.messages.Progress."""

    attempt: int
    seq: int
    body: bytes
    more: bool = False
    ask: bool = False


class Incoming:
    """The progress of one job."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._totals: dict[str, int] = {}
        self._last_attempt = 0

    def put(self, server: str, message: Message) -> list[Report]:
        """Take in a message; returns the reports that are whole now.

        Raises:
            EndlessReportError: The report is too large.
        """
        stream = self._streams.get(server)
        if stream is None or stream.wire_attempt < message.attempt:
            self._last_attempt = max(message.attempt, self._last_attempt + 1)
            stream = self._streams[server] = _Stream(server, message.attempt, self._last_attempt)
        return stream.put(message) if stream.wire_attempt == message.attempt else []

    def taken(self, report: Report) -> None:
        """The caller has taken a report, and so all before it."""
        stream = self._streams.get(report.server)
        if stream is not None and stream.attempt == report.attempt:
            stream.take(report.seq)

    def is_word_due(self, server: str) -> bool:
        """Whether the server asked for a word at a message that was taken since the last word."""
        stream = self._streams.get(server)
        return stream is not None and bool(stream.asked) and stream.asked[0] <= stream.heard

    def word(self, server: str) -> tuple[int, int] | None:
        """Return the attempt by the server's count and the last message taken, if that is news to the server."""
        stream = self._streams.get(server)
        if stream is None or stream.said == stream.heard:
            return None
        stream.said = stream.heard
        while stream.asked and stream.asked[0] <= stream.heard:
            stream.asked.popleft()
        return stream.wire_attempt, stream.heard

    def has_gap(self, server: str) -> bool:
        """Whether something came before what goes before it: that was lost on the way."""
        return server in self._streams and bool(self._streams[server].early)

    def waits_for_caller(self, server: str) -> bool:
        """Whether the caller has not taken all that it was given: then there may be no room for more."""
        return server in self._streams and bool(self._streams[server].untaken)

    def here(self, server: str) -> tuple[int, int, int] | None:
        """Return the attempt by the server's count, the last message taken, and the last one here."""
        stream = self._streams.get(server)
        return None if stream is None else (stream.wire_attempt, stream.heard, stream.received)

    def expect(self, server: str, total: int | None) -> None:
        """This server's outcome is known, and so many messages go before it."""
        self._totals[server] = total or 0

    def is_whole(self, server: str) -> bool:
        """Whether all that goes before this server's outcome was given out."""
        stream = self._streams.get(server)
        return (stream.received if stream is not None else 0) >= self._totals.get(server, 0)


@dataclass(slots=True)
class _Stream:
    """What one server sends in one attempt."""

    server: str
    wire_attempt: int
    attempt: int
    """As the caller counts."""
    received: int = 0
    taken: int = 0
    said: int = 0
    """What the server was last told of that."""
    number: int = 0
    early: dict[int, Message] = field(default_factory=dict)
    joining: bytearray = field(default_factory=bytearray)
    untaken: deque[tuple[int, int]] = field(default_factory=deque)
    """The last message of each report that was given out, and its bytes."""
    asked: deque[int] = field(default_factory=deque)
    kept_bytes: int = 0

    @property
    def heard(self) -> int:
        """Up to here the server keeps nothing: parts of a report that is still coming in count once nothing waits."""
        return self.taken if self.untaken else self.received

    def put(self, message: Message) -> list[Report]:
        if message.seq <= self.received or message.seq in self.early or not self._has_room(message):
            return []
        self.early[message.seq] = message
        self.kept_bytes += _cost_bytes(message.body)
        return self._whole()

    def take(self, seq: int) -> None:
        while self.untaken and self.untaken[0][0] <= seq:
            self.taken, size_bytes = self.untaken.popleft()
            self.kept_bytes -= size_bytes

    def _has_room(self, message: Message) -> bool:
        """Always for the next one while nothing waits: a report may be larger than the room."""
        if message.seq == self.received + 1 and not self.untaken:
            return True
        return self.kept_bytes + _cost_bytes(message.body) <= MAX_KEPT_BYTES

    def _whole(self) -> list[Report]:
        reports: list[Report] = []
        while (message := self.early.pop(self.received + 1, None)) is not None:
            self.received = message.seq
            self.kept_bytes -= _cost_bytes(message.body)
            if message.ask:
                self.asked.append(message.seq)
            self.joining += message.body
            if len(self.joining) > MAX_REPORT_BYTES:
                raise EndlessReportError
            if not message.more:
                reports.append(self._joined())
        return reports

    def _joined(self) -> Report:
        body, self.joining = bytes(self.joining), bytearray()
        self.number += 1
        self.untaken.append((self.received, _cost_bytes(body)))
        self.kept_bytes += _cost_bytes(body)
        return Report(self.server, self.attempt, self.number, self.received, body)


def _cost_bytes(body: bytes) -> int:
    return len(body) + KEPT_OVERHEAD_BYTES
