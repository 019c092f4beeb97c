"""Servers that refuse jobs as late though they were just sent: their clocks and this host's differ.

Such a server always has room, as it runs nothing, so its grants are passed over
for a while. Pure.
"""

from __future__ import annotations

DOUBT_S = 5.0
"""How long the grants of such a server are passed over."""


class Clocks:
    """Whose clocks are in doubt.

    Args:
        give_up_s: For how long a job that is refused as late is tried elsewhere.
    """

    def __init__(self, *, give_up_s: float) -> None:
        self._give_up_s = give_up_s
        self._doubted_until: dict[str, float] = {}

    def is_doubted(self, server: str, now: float) -> bool:
        """Whether the server refused a job as late a moment ago."""
        if self._doubted_until.get(server, now) > now:
            return True
        self._doubted_until.pop(server, None)
        return False

    def refused(self, server: str, now: float) -> bool:
        """A server refused a job as late; whether that is news."""
        is_news = not self.is_doubted(server, now)
        self._doubted_until = {known: until for known, until in self._doubted_until.items() if until > now}
        self._doubted_until[server] = now + DOUBT_S
        return is_news

    def is_hopeless(self, late_since: float, now: float) -> bool:
        """Whether a job was refused as late for so long that the doubt is about this host's clock."""
        return now - late_since >= self._give_up_s
