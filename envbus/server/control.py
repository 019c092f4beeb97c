"""An operator's orders to one server: drain, stop, log level. Runs on the bus thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.failures import to_failure
from envbus.bus.messages import Control, Ok, WireMessage, pack, parse_as
from envbus.bus.subjects import Subjects
from envbus.errors import BadRequestError, EnvbusError
from envbus.server.reception import Reception

log = logging.getLogger("envbus.server")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class ControlDesk:
    """Obeys operators.

    Args:
        stop: Called for ``stop`` and for ``drain``: a drained server ends.
    """

    def __init__(
        self, connection: Connection, subjects: Subjects, reception: Reception, *, stop: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._reception = reception
        self._stop = stop

    async def open(self, server_id: str) -> None:
        """Listen for orders to this server and to all of its env."""
        self._server_id = server_id
        for subject in (self._subjects.ctl(server_id), self._subjects.ctl_all):
            await self._connection.subscribe(subject, self._on_order)

    def _on_order(self, message: Any) -> None:
        answer: WireMessage
        try:
            answer = self._obey(parse_as(message.data, Control))
        except EnvbusError as error:
            answer = to_failure(error, origin=self._server_id)
        if self._connection.is_inbox(message.reply):
            self._connection.send(message.reply, pack(answer))

    def _obey(self, order: Control) -> Ok:
        log.info("operator: %s %s", order.action, order.level or "")
        if order.action == "log_level":
            level = (order.level or "").upper()
            if level not in LEVELS:
                raise BadRequestError(f"log level {order.level!r}: one of {', '.join(LEVELS)}")
            logging.getLogger("envbus").setLevel(level)
        else:
            self._reception.drain()
            self._stop()
        return Ok(server=self._server_id, state=self._reception.state)
