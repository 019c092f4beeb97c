"""Which subjects NATS denied to this connection's user; it tells of a denial only on the side."""

from __future__ import annotations

import logging

log = logging.getLogger("envbus.bus")


class Denials:
    """The denials of one connection.

    Args:
        inbox: The connection's inbox subject: a denial of it has a remedy of its own.
    """

    def __init__(self, inbox: str) -> None:
        self._inbox = inbox.lower()
        self._texts: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def note(self, error: str) -> str | None:
        """Take in an error text of the client library; returns the denied subject if it is a denial.

        The text is in lower case, as nats-py gives it: ``nats: permissions violation for publish to "x.y"``.
        """
        if "permissions violation" not in error.lower():
            return None
        subject = error.lower().partition('"')[2].partition('"')[0]
        action = "subscribe" if "subscription" in error.lower() else "publish"
        text = f"NATS denied this user to {action} to {subject!r}; give it that permission"
        if self.is_inbox(subject):
            text += ", or set the inbox prefix that it may use (inbox_prefix)"
        self._texts[subject] = text
        log.error("%s", text)
        return subject

    def is_inbox(self, subject: str) -> bool:
        """Whether a denied subject is the connection's own inbox."""
        return subject.startswith(self._inbox)

    def of(self, subject: str) -> str | None:
        """Return what to say of a subject, if it was denied."""
        return self._texts.get(subject.lower())

    def clear(self) -> None:
        """Forget all: another connection may have other permissions."""
        self._texts.clear()
