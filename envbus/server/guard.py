"""What every handler of messages from strangers needs: an inbox to answer to, and an answer whatever goes wrong.

Refusing costs more than reading: under a flood of bad messages only so many are
answered in a second, and the others are counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.failures import to_failure
from envbus.bus.inbox import is_closed_notice
from envbus.bus.messages import pack
from envbus.errors import EnvbusError
from envbus.notices import Notices
from envbus.server.allowance import Allowance

Handler = Callable[[Any], None]
_MAX_TEXT = 200


class Guard:
    """Wraps the message handlers of one server.

    Args:
        server_id: Origin of the failures that are answered.
        counts: ``no_inbox``, ``refused`` and of these ``unanswered`` are counted here.
        notices: Where bad messages are logged.
    """

    def __init__(self, connection: Connection, *, server_id: str, counts: Counter[str], notices: Notices) -> None:
        self._connection = connection
        self._server_id = server_id
        self._counts = counts
        self._notices = notices
        self._refusals = Allowance()

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
            except Exception as error:  # noqa: BLE001 - answered, and logged by _is_answered()
                if self._is_answered(message, error):
                    self._connection.send(message.reply, answer(message, error))

        return handle

    def _is_answered(self, message: Any, error: Exception) -> bool:
        self._counts["refused"] += 1
        if not self._refusals.take(time.monotonic()):
            self._counts["unanswered"] += 1
            self._note("unanswered", f"messages on {message.subject} are refused without an answer: too many are bad")
            return False
        if isinstance(error, EnvbusError):
            self._note("refused", f"a message on {message.subject} was refused: {str(error)[:_MAX_TEXT]}")
        else:
            self._note("not handled", f"a message on {message.subject} could not be handled", error)
        return True

    def _has_inbox(self, message: Any) -> bool:
        if self._connection.is_inbox(message.reply):
            return True
        self._counts["no_inbox"] += 1
        self._note("no inbox", f"a message on {message.subject} without an inbox to reply to was dropped")
        return False

    def _note(self, kind: str, text: str, error: Exception | None = None) -> None:
        self._notices.note(kind, text, time.monotonic(), error=error)

    def _failure(self, message: Any, error: Exception) -> bytes:
        return pack(to_failure(error, origin=self._server_id))
