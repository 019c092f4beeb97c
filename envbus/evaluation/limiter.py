"""A first-in, first-out line of work under one limit on total weight (pure).

A rollout weighs 1 and a group of n weighs n, so the limit counts rollouts.
Nothing overtakes: work at the head that does not fit yet holds the rest back.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from envbus.errors import UsageError

T = TypeVar("T")


class FifoLimiter(Generic[T]):
    """Says which waiting items may start under the limit.

    Args:
        limit: Most weight that may be running at once; -1 for no limit.

    Raises:
        UsageError: The limit is neither positive nor -1.
    """

    def __init__(self, limit: int = -1) -> None:
        if limit != -1 and limit < 1:
            raise UsageError(f"max_concurrent must be at least 1, or -1 for no limit; got {limit}")
        self.limit = limit
        self.running = 0
        self._waiting: deque[tuple[T, int]] = deque()

    def __len__(self) -> int:
        """Number of items that have not started."""
        return len(self._waiting)

    def add(self, item: T, *, weight: int = 1) -> None:
        """Put an item at the end of the line.

        Raises:
            UsageError: The item alone is over the limit and would wait for ever.
        """
        if self.limit != -1 and weight > self.limit:
            raise UsageError(
                f"a group of {weight} rollouts does not fit max_concurrent={self.limit}; "
                "raise max_concurrent or use fewer rollouts per example"
            )
        self._waiting.append((item, weight))

    def start_ready(self) -> list[T]:
        """Take the items that may start now off the line; their weight is running until released."""
        ready: list[T] = []
        while self._waiting and self._fits(self._waiting[0][1]):
            item, weight = self._waiting.popleft()
            self.running += weight
            ready.append(item)
        return ready

    def release(self, *, weight: int = 1) -> None:
        """Give back the weight of an item that has ended."""
        self.running -= weight

    def _fits(self, weight: int) -> bool:
        return self.limit == -1 or self.running + weight <= self.limit
