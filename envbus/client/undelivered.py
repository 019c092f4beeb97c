"""Bounds the large results between the bus and a caller that is slow to take them, or whose loop is blocked.

A result is pulled only when there is room for it, in the order in which they were
announced; the others stay on their servers. On the bus loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Waiting:
    job_id: str
    size_bytes: int
    turn: asyncio.Future[None]


class Undelivered:
    """Results of one client that are being pulled, or that its caller has not taken yet.

    Args:
        max_bytes: For all of them; a single one may be larger, and then is the only one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: Counter[str] = Counter()
        self._waiting: deque[_Waiting] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes) + len(self._waiting)

    async def reserve(self, job_id: str, size_bytes: int) -> None:
        """Wait for room for a job's result; give it back with release()."""
        waiting = _Waiting(job_id, size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._admit()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._admit()  # what waited behind it may fit
            else:
                self.release(job_id)
            raise

    def release(self, job_id: str) -> None:
        """The caller has the result, or nobody wants it any more. Harmless for a job without one."""
        self.size_bytes -= self._sizes.pop(job_id, 0)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0].size_bytes):
            first = self._waiting.popleft()
            self._sizes[first.job_id] += first.size_bytes
            self.size_bytes += first.size_bytes
            if not first.turn.done():
                first.turn.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        return self.size_bytes == 0 or self.size_bytes + size_bytes <= self._max_bytes
