"""An operator's orders to one server (drain, stop, log level) and questions (is it there, its log).

Runs on the bus thread; the log file is read elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.control_messages import LogsRequest, StatusRequest
from envbus.bus.failures import to_failure
from envbus.bus.messages import Control, Ok, WireMessage, pack, parse
from envbus.bus.subjects import Subjects
from envbus.bus.tasks import TaskSet
from envbus.errors import BadRequestError, EnvbusError, RemoteError
from envbus.server.allowance import Allowance
from envbus.server.log_lines import answer_logs
from envbus.server.reception import Reception

log = logging.getLogger("envbus.server")
MAX_READING = 16
"""Requests for log lines being answered at once."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class ControlDesk:
    """Obeys operators.

    Args:
        stop: Called with ``"stop"`` or ``"drain"``: a drained server ends.
        log_file: Where this server logs, for operators who ask for lines.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        reception: Reception,
        *,
        stop: Callable[[str], None],
        log_file: Path | str | None = None,
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._reception = reception
        self._stop = stop
        self._log_file = log_file
        self._tasks = TaskSet("the control desk")
        self._allowance = Allowance()

    async def open(self, server_id: str) -> None:
        """Listen for orders to this server and to all of its env."""
        self._server_id = server_id
        self._subscriptions = [
            await self._connection.subscribe(subject, self._on_order)
            for subject in (self._subjects.ctl(server_id), self._subjects.ctl_all)
        ]

    async def close(self) -> None:
        """Listen no more."""
        for subscription in self._subscriptions:
            await self._connection.leave(subscription)
        await self._tasks.close()

    def _on_order(self, message: Any) -> None:
        if not self._allowance.take(time.monotonic()):
            return
        try:
            request = parse(message.data)
            if isinstance(request, LogsRequest):
                self._tell_log(request, message.reply)
                return
            answer = self._answer(request)
        except EnvbusError as error:
            answer = to_failure(error, origin=self._server_id)
        self._reply(message.reply, answer)

    def _answer(self, request: WireMessage) -> WireMessage:
        match request:
            case Control():
                return self._obey(request)
            case StatusRequest():
                return Ok(server=self._server_id, state=self._reception.state)
        raise BadRequestError(f"{request.kind!r} is no order to a server")

    def _reply(self, reply: str, answer: WireMessage) -> None:
        if self._connection.is_inbox(reply):
            self._connection.send(reply, pack(answer))

    def _tell_log(self, request: LogsRequest, reply: str) -> None:
        if self._log_file is None:
            raise BadRequestError("this server has no log file: start it with --log-file, or by envbus up")
        if len(self._tasks) >= MAX_READING:
            raise RemoteError(f"{MAX_READING} log requests are being answered; try again", retryable=True)
        self._tasks.spawn(self._read_log(self._log_file, request, reply))

    async def _read_log(self, log_file: Path | str, request: LogsRequest, reply: str) -> None:
        answer: WireMessage
        try:
            answer = await answer_logs(
                request, server=self._server_id, log_file=log_file, max_payload=self._connection.max_payload
            )
        except EnvbusError as error:
            answer = to_failure(error, origin=self._server_id)
        self._reply(reply, answer)

    def _obey(self, order: Control) -> Ok:
        log.info("operator: %s %.20r", order.action, order.level or "")
        if order.action == "log_level":
            level = (order.level or "").upper()
            if level not in LEVELS:
                raise BadRequestError(f"log level {order.level!r}: one of {', '.join(LEVELS)}")
            logging.getLogger("envbus").setLevel(level)
        else:
            self._reception.drain()
            self._stop(order.action)
        return Ok(server=self._server_id, state=self._reception.state)
