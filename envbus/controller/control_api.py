"""What operators ask of one controller over the bus, and that no other one has its name."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from envbus.bus.connection import Connection, Subscription
from envbus.bus.control_messages import (
    ControllerBeat,
    LogLines,
    LogsRequest,
    Restart,
    Scale,
    StatusRequest,
    StopController,
)
from envbus.bus.failures import to_failure
from envbus.bus.messages import Ok, WireMessage, pack, parse, parse_as
from envbus.bus.subjects import controller, controller_beat
from envbus.bus.tasks import TaskSet
from envbus.errors import BadRequestError, BusPermissionError, EnvbusError, NoServerError, UsageError
from envbus.notices import Notices

log = logging.getLogger("envbus.controller")

CLAIM_TIMEOUT_S = 3.0
ENVELOPE_BYTES = 1024
SHORT_CHARS = 200


class Orders(Protocol):
    """The controller, as its control API needs it."""

    def report(self) -> ControllerBeat:
        """What it runs."""

    def scale(self, order: Scale) -> str:
        """Obey, and say what will happen."""

    def restart(self, order: Restart) -> str:
        """Obey, and say what will happen."""

    def stop(self) -> None:
        """Drain all servers and end."""

    async def read_log(self, request: LogsRequest) -> LogLines:
        """Lines of a server's log."""

    def on_rival(self, beat: ControllerBeat) -> None:
        """Another controller beats under this one's name."""


class ControlApi:
    """Answers operators on the controller's subject."""

    def __init__(
        self, connection: Connection, controller_id: str, *, prefix: str, orders: Orders, notices: Notices
    ) -> None:
        self._connection = connection
        self._controller_id = controller_id
        self._subject = controller(controller_id, prefix)
        self.beat_subject = controller_beat(controller_id, prefix)
        self._orders = orders
        self._notices = notices
        self._subscriptions: list[Subscription] = []
        self._tasks = TaskSet("the control API")
        self._is_asking = False

    @property
    def subscribed(self) -> tuple[str, str]:
        """What it has subscribed to."""
        return self._subject, self.beat_subject

    async def open(self) -> None:
        """Claim the name and listen.

        Raises:
            UsageError: Another controller has the name.
        """
        await self._check_name()
        self._subscriptions = [
            await self._connection.subscribe(self._subject, self._on_request),
            await self._connection.subscribe(self.beat_subject, self._on_beat),
        ]

    async def close(self) -> None:
        """Listen no more."""
        await self._tasks.close()
        for subscription in self._subscriptions:
            await self._connection.leave(subscription)

    async def send_beat(self) -> None:
        """Beat once; skipped while the connection is down."""
        try:
            await self._connection.publish(self.beat_subject, pack(self._report()))
        except EnvbusError as error:
            text = f"the controller's beat was not sent: {error}"
            self._notices.note("beat not sent", text, time.monotonic(), level=logging.ERROR)

    def _report(self) -> ControllerBeat:
        return fitting(self._orders.report(), max_bytes=self._connection.max_payload - ENVELOPE_BYTES)

    async def _check_name(self) -> None:
        try:
            data = await self._connection.request(self._subject, pack(StatusRequest()), timeout_s=CLAIM_TIMEOUT_S)
            other = parse_as(data, ControllerBeat)
        except NoServerError:
            return
        except BusPermissionError as error:
            log.warning("%s; without it a second controller of this name is not noticed at the start", error)
            return
        except TimeoutError:
            raise UsageError(
                f"a controller named {self._controller_id!r} is on the bus but does not answer; "
                "end it, or give this one another [controller] id"
            ) from None
        raise UsageError(name_taken_text(other))

    def _on_beat(self, message: Any) -> None:
        try:
            beat = parse_as(message.data, ControllerBeat)
        except EnvbusError as error:
            self._notices.note("bad controller beat", f"a controller's beat was dropped: {error}", time.monotonic())
            return
        if beat.controller != self._controller_id:
            return
        if self._is_other(beat) and not self._is_asking:
            self._is_asking = True
            self._tasks.spawn(self._ask_rival(beat))

    def _is_other(self, beat: ControllerBeat) -> bool:
        mine = self._orders.report()
        return (beat.host, beat.pid, beat.started_at) != (mine.host, mine.pid, mine.started_at)

    async def _ask_rival(self, beat: ControllerBeat) -> None:
        """Believe in a rival if it answers to this name, too: a beat alone may come from anybody."""
        found: asyncio.Future[ControllerBeat] = asyncio.get_running_loop().create_future()
        token = self._connection.inbox.route(lambda message: self._on_answer(message, found))
        try:
            reply = self._connection.inbox.reply_subject(token)
            await self._connection.publish(self._subject, pack(StatusRequest()), reply=reply)
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                self._orders.on_rival(await found)
        except TimeoutError:
            if self._connection.denied("publish", self._subject):
                self._orders.on_rival(beat)
            else:
                text = f"beats of another controller {beat.controller} on host {beat.host} come, but it does not answer"
                self._notices.note("no rival", text, time.monotonic())
        finally:
            self._connection.inbox.unroute(token)
            self._is_asking = False

    def _on_answer(self, message: Any, found: asyncio.Future[ControllerBeat]) -> None:
        try:
            answer = parse_as(message.data, ControllerBeat)
        except EnvbusError:
            return
        if not found.done() and answer.controller == self._controller_id and self._is_other(answer):
            found.set_result(answer)

    def _on_request(self, message: Any) -> None:
        try:
            request = parse(message.data)
            if isinstance(request, LogsRequest):
                self._tasks.spawn(self._tell_log(request, message.reply))
                return
            answer = self._answer(request)
        except EnvbusError as error:
            answer = to_failure(error, origin=self._controller_id)
        self._reply(message.reply, answer)

    def _answer(self, request: WireMessage) -> WireMessage:
        match request:
            case StatusRequest():
                return self._report()
            case Scale():
                state = self._orders.scale(request)
            case Restart():
                state = self._orders.restart(request)
            case StopController():
                self._orders.stop()
                state = "draining all servers"
            case _:
                raise BadRequestError(f"{request.kind!r} is no order to a controller")
        return Ok(server=self._controller_id, state=state)

    async def _tell_log(self, request: LogsRequest, reply: str) -> None:
        try:
            answer: WireMessage = await self._orders.read_log(request)
        except EnvbusError as error:
            answer = to_failure(error, origin=self._controller_id)
        self._reply(reply, answer)

    def _reply(self, reply: str, answer: WireMessage) -> None:
        if self._connection.is_inbox(reply):
            self._connection.send(reply, pack(answer))


def fitting(report: ControllerBeat, *, max_bytes: int) -> ControllerBeat:
    """Return the report as it fits on one message: with many servers, only the first line of how each ended."""
    if len(pack(report)) <= max_bytes:
        return report
    short = [
        process.model_copy(update={"last_exit": process.last_exit and _first_line(process.last_exit)})
        for process in report.processes
    ]
    envs = [env.model_copy(update={"failed": env.failed and _first_line(env.failed)}) for env in report.envs]
    return report.model_copy(update={"processes": short, "envs": envs})


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:SHORT_CHARS]


def name_taken_text(other: ControllerBeat) -> str:
    """Say that a controller's name is taken, and by whom."""
    return (
        f"a controller named {other.controller!r} already runs on host {other.host} (process {other.pid}); "
        "stop it, or give this one another [controller] id"
    )
