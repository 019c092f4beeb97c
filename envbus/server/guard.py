"""What every handler of messages from strangers needs: an inbox to answer to, and an answer whatever goes wrong."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.failures import to_failure
from envbus.bus.inbox import is_closed_notice
from envbus.bus.messages import pack
from envbus.errors import EnvbusError

log = logging.getLogger("envbus.server")

Handler = Callable[[Any], None]


class Guard:
    """Wraps the message handlers of one server.

    Args:
        server_id: Origin of the failures that are answered.
        counts: ``no_inbox`` and ``refused`` are counted here.
    """

    def __init__(self, connection: Connection, *, server_id: str, counts: Counter[str]) -> None:
        self._connection = connection
        self._server_id = server_id
        self._counts = counts

    def around(self, handler: Handler, *, refusal: Callable[[Any, Exception], bytes] | None = None) -> Handler:
        """Return a handler that drops what has no inbox, and answers errors instead of raising them.

        Args:
            refusal: Makes the answer of ``(message, error)``; default: a Failure.
        """
        answer = refusal or self._failure

        def handle(message: Any) -> None:
            if is_closed_notice(message) or not self._has_inbox(message):
                return
            try:
                handler(message)
            except Exception as error:
                if isinstance(error, EnvbusError):
                    self._counts["refused"] += 1
                else:
                    log.exception("a message on %s could not be handled", message.subject)
                self._connection.send(message.reply, answer(message, error))

        return handle

    def _has_inbox(self, message: Any) -> bool:
        if self._connection.is_inbox(message.reply):
            return True
        self._counts["no_inbox"] += 1
        log.warning("a message on %s without an inbox to reply to was dropped", message.subject)
        return False

    def _failure(self, message: Any, error: Exception) -> bytes:
        return pack(to_failure(error, origin=self._server_id))
