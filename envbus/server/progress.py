"""The progress of one job until its caller has taken it: cut into messages, windowed, sent again where lost.

Pure: events in, messages to send out. Invariant: sent and not yet heard of is at most one window (or one message), and
messages leave in the order of their numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

REPORT_OVERHEAD_BYTES = 256
"""What keeping a report takes beside its bytes."""
ASKS_PER_WINDOW = 4
"""How often the client is asked for a word while the window fills, so that it never runs dry."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a job's progress.

    Attributes:
        more: The report goes on in the next one.
        ask: The client shall say at once when its caller has taken it.
    """

    seq: int
    body: bytes
    more: bool
    ask: bool

    @property
    def cost_bytes(self) -> int:
        """What it takes of the window."""
        return len(self.body) + (0 if self.more else REPORT_OVERHEAD_BYTES)


def cost_bytes(body: bytes) -> int:
    """Return what a report takes of the window, in all its messages."""
    return len(body) + REPORT_OVERHEAD_BYTES


class ProgressBuffer:
    """What one job reported and its caller has not taken.

    Args:
        attempt: The one that the job was taken with.
        window_bytes: Sent and not yet heard of, at most.
    """

    def __init__(self, *, attempt: int, window_bytes: int) -> None:
        self.attempt = attempt
        self.last = 0
        """The number of the last message, sent or not."""
        self._window_bytes = window_bytes
        self._unsent: deque[Chunk] = deque()
        self._unheard: deque[Chunk] = deque()
        self._unheard_bytes = 0
        self._unasked_bytes = 0
        self._sent = 0
        self._told_at = 0
        """The last message that was sent before the client was last told something by which it knows what it lacks."""

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._unheard_bytes + sum(chunk.cost_bytes for chunk in self._unsent)

    def put(self, body: bytes, *, chunk_bytes: int) -> list[Chunk]:
        """Take in a report; returns what to send now."""
        is_large = cost_bytes(body) * ASKS_PER_WINDOW >= self._window_bytes
        for start in range(0, max(1, len(body)), chunk_bytes):
            part, more = body[start : start + chunk_bytes], start + chunk_bytes < len(body)
            self.last += 1
            ask = self._is_time_to_ask(len(part)) or (is_large and not more)
            self._unsent.append(Chunk(self.last, part, more, ask))
        return list(self._sendable())

    def heard(self, seq: int) -> tuple[int, list[Chunk]]:
        """The caller has taken everything up to ``seq``; returns the bytes that became free, and what to send now."""
        freed_bytes = 0
        while self._unheard and self._unheard[0].seq <= seq:
            chunk = self._unheard.popleft()
            freed_bytes += chunk.cost_bytes
        self._unheard_bytes -= freed_bytes
        return freed_bytes, list(self._sendable())

    def lost(self, received: int) -> list[Chunk]:
        """The client asks, and has everything up to ``received``: returns what it should have by now but lacks.

        What was sent since it was last told something may still be on its way: that is for the next time.
        """
        due, self._told_at = self._told_at, self._sent
        return [chunk for chunk in self._unheard if received < chunk.seq <= due]

    def told(self) -> None:
        """The client is told the outcome, behind all that was sent."""
        self._told_at = self._sent

    def _is_time_to_ask(self, size_bytes: int) -> bool:
        self._unasked_bytes += size_bytes + REPORT_OVERHEAD_BYTES
        if self._unasked_bytes * ASKS_PER_WINDOW < self._window_bytes:
            return False
        self._unasked_bytes = 0
        return True

    def _sendable(self) -> Iterator[Chunk]:
        while self._unsent:
            cost = self._unsent[0].cost_bytes
            if self._unheard and self._unheard_bytes + cost > self._window_bytes:
                return
            chunk = self._unsent.popleft()
            self._unheard.append(chunk)
            self._unheard_bytes += cost
            self._sent = chunk.seq
            yield chunk
