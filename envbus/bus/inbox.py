"""One inbox for all replies to a connection: each reply goes to the handler of its last token.

Also what a handler may get that is no reply: "nobody was there" from NATS, and
"the connection was closed" from here, so that no wait outlives the connection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from envbus.errors import BusClosedError, NoServerError

MAPPED_INBOX = "_R_."
"""How reply subjects begin that NATS has put in place of another account's."""
INBOX_PREFIXES = ("_INBOX.", "_INBOX_", MAPPED_INBOX)
"""How reply subjects begin: of clients, of clients with a prefix of their own, and mapped between accounts."""
Handler = Callable[[Any], None]
"""Gets a message (subject, reply, data, headers); must only enqueue or decide, never wait."""
StrayHandler = Callable[[str, Any], None]
"""Gets the token and a message that nobody waits for any more."""


class Inbox:
    """The reply subjects of one connection.

    Args:
        prefix: What the user may subscribe to; ``_INBOX`` unless permissions say otherwise.
    """

    def __init__(self, prefix: str) -> None:
        self.subject = f"{prefix}.{secrets.token_hex(11)}"
        self._handlers: dict[str, Handler] = {}
        self.strays: set[StrayHandler] = set()
        """Hear of what is dropped."""

    def __len__(self) -> int:
        return len(self._handlers)

    @property
    def pattern(self) -> str:
        """What to subscribe to."""
        return f"{self.subject}.*"

    def route(self, handler: Handler, *, token: str | None = None) -> str:
        """Give replies to a new token, or to this one, to a handler; returns the token."""
        if token is None:
            # Who was sent one request knows the rest of the subject, and must not answer another one.
            token = secrets.token_hex(8)
        self._handlers[token] = handler
        return token

    def unroute(self, token: str) -> None:
        """Drop what arrives for the token from now on."""
        self._handlers.pop(token, None)

    def reply_subject(self, token: str) -> str:
        """Return the reply subject of a token."""
        return f"{self.subject}.{token}"

    def deliver(self, message: Any) -> None:
        """Hand a message to its handler; one that nobody waits for is dropped."""
        token = message.subject.rpartition(".")[2]
        handler = self._handlers.get(token)
        if handler is not None:
            handler(message)
            return
        for stray_handler in tuple(self.strays):
            stray_handler(token, message)

    def close(self) -> None:
        """Tell every handler that no reply will come any more."""
        for handler in list(self._handlers.values()):
            handler(_CLOSED)
        self._handlers.clear()


class _ClosedNotice:
    subject = ""
    reply = ""
    data = b""
    headers = None


_CLOSED = _ClosedNotice()


def is_closed_notice(message: Any) -> bool:
    """Whether this says that the connection was closed, instead of being a message."""
    return message is _CLOSED


def is_no_responders(message: Any) -> bool:
    """Whether NATS says that nobody was there to get the request (503)."""
    return bool(message.headers) and message.headers.get("Status") == "503" and not message.data


def settle(future: asyncio.Future[bytes], message: Any, subject: str) -> None:
    """Give a future the reply to a request on ``subject``, or why there is none."""
    if future.done():
        return
    if is_closed_notice(message):
        future.set_exception(BusClosedError("the connection was closed while a reply was awaited"))
    elif is_no_responders(message):
        future.set_exception(NoServerError(f"nobody answers on {subject}"))
    else:
        future.set_result(message.data)
