"""Hears that an env without servers will not get any: it could not be loaded, and no controller tries again.

Told by the last heartbeat of a server that could not load it, and by controllers.
Open only while somebody waits and no server is ready. On the bus loop.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any, Self

from envbus.bus.connection import Connection, Subscription
from envbus.bus.control_messages import ControllerBeat, EnvReport
from envbus.bus.messages import Beat, InfoRequest, pack, parse_as
from envbus.bus.subjects import Subjects, all_controller_beats, controller_beat, parse_beat
from envbus.client.presence import LISTEN_S
from envbus.errors import EnvbusError, EnvironmentCrashedError, NoServerError
from envbus.settings import PROBE_TIMEOUT_S

log = logging.getLogger("envbus.client")


class Crashes:
    """Listens to one env's servers and to the controllers, and logs what goes wrong with the env."""

    def __init__(self, connection: Connection, subjects: Subjects) -> None:
        self._connection = connection
        self._subjects = subjects
        self._subscriptions: list[Subscription] = []
        self._controllers = all_controller_beats(subjects.prefix)
        self._crash: str | None = None
        self._crashed_under: str | None = None
        """The controller of the server that could not load the env."""
        self._troubles: dict[str, str] = {}
        """What each controller says about servers of the env that ended."""
        self._reports: dict[str, EnvReport] = {}
        """What each controller wants of the env."""
        self._warned: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        self._listening_since = asyncio.get_running_loop().time()
        subscribe, without = self._connection.subscribe, "it is not told why an env has no servers"
        self._subscriptions = [
            await subscribe(self._subjects.beats, self._on_beat, optional=without),
            await subscribe(self._controllers, self._on_controller, optional=without),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for subscription in self._subscriptions:
            await self._connection.leave(subscription)

    def troubles(self) -> list[str]:
        """What controllers said about servers of the env that ended."""
        return sorted(self._troubles.values())

    async def certain(self) -> EnvironmentCrashedError | None:
        """Return the error for those who wait, once it is certain that no server will come."""
        reason = self._reason()
        if reason is None:
            return None
        try:
            await self._connection.request(self._subjects.info, pack(InfoRequest()), timeout_s=PROBE_TIMEOUT_S)
            self._crash = None  # another server is there
        except NoServerError:
            return EnvironmentCrashedError(f"env {self._subjects.env!r} has no server: {reason}")
        except (EnvbusError, TimeoutError):
            pass  # not certain
        self._listening_since = asyncio.get_running_loop().time()  # and not asked again at once
        return None

    def _reason(self) -> str | None:
        heard_all = asyncio.get_running_loop().time() - self._listening_since >= LISTEN_S
        some_try = any(report.failed is None and report.replicas > 0 for report in self._reports.values())
        may_try = self._crashed_under is not None and self._connection.denied("subscribe", self._controllers)
        if some_try or may_try or not heard_all:
            return None
        given_up = [self._troubles[name] for name, report in sorted(self._reports.items()) if report.failed]
        return "; ".join(given_up) or self._crash

    def _on_beat(self, message: Any) -> None:
        try:
            beat = parse_as(message.data, Beat)
        except EnvbusError:
            return
        is_own = parse_beat(message.subject, self._subjects.prefix) == (self._subjects.env, beat.server)
        if is_own and beat.state == "failed":
            self._crash = f"server {beat.server[:8]} on host {beat.host} could not load it: {beat.error}"
            self._crashed_under = beat.controller
            if beat.controller is None or self._connection.denied("subscribe", self._controllers):
                self._warn("servers", self._crash)

    def _on_controller(self, message: Any) -> None:
        try:
            beat = parse_as(message.data, ControllerBeat)
        except EnvbusError:
            return
        name, env = beat.controller, self._subjects.env
        if message.subject != controller_beat(name, self._subjects.prefix):
            return  # NATS checks who may publish where, so a beat counts only on its own subject
        exits = [process.last_exit for process in beat.processes if process.env == env and process.last_exit]
        if exits:
            self._troubles[name] = f"controller {name} on host {beat.host} says: {exits[-1]}"
            self._warn(name, self._troubles[name])
        for report in beat.envs:
            if report.env == env:
                self._reports[name] = report
                if report.failed is not None:
                    self._troubles[name] = f"controller {name} on host {beat.host} says: {report.failed}"

    def _warn(self, source: str, text: str) -> None:
        """Once for each kind of crash: its first line is the same every time, the log below it another."""
        kind = text.partition("\n")[0]
        if self._warned.get(source) != kind:
            self._warned[source] = kind
            log.warning("env %s: %s", self._subjects.env, text)
