"""How many answers that cost more than their questions a server gives in a second. Pure.

Reading a message is cheap, answering it is not: under a flood the answers end
first, so that the messages of others are reached soon.
"""

from __future__ import annotations

PER_S = 500.0
AT_ONCE = 2000.0


class Allowance:
    """So many per second, and more at once if there were few before."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._as_of = 0.0

    def take(self, now: float) -> bool:
        """Use one, if one is left."""
        self._left = min(AT_ONCE, self._left + (now - self._as_of) * PER_S)
        self._as_of = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
