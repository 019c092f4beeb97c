"""An operator's connection to a fleet: listens to heartbeats, asks servers and controllers, gives them orders.

Lives on the caller's event loop, with the bus thread underneath. Keeps a Fleet up to
date while it is connected; it holds no other state.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.bus import Bus
from envbus.bus.connection import Connection
from envbus.bus.control_messages import LogLines, LogsRequest, Restart, Scale, StatusRequest, StopController
from envbus.bus.failures import from_failure
from envbus.bus.messages import Beat, Control, Failure, Info, InfoRequest, WireMessage, pack, parse
from envbus.bus.subjects import DEFAULT_PREFIX, Subjects, check_prefix, controller
from envbus.bus.thread import Crossing
from envbus.controller.fleet import Fleet
from envbus.controller.fleet_views import PRESENT, FleetView, ServerView
from envbus.controller.hearing import Hearing
from envbus.controller.targets import Target, controllers_of, runs_of, spread
from envbus.errors import (
    BadRequestError,
    BusAuthError,
    BusPermissionError,
    CallTimeoutError,
    DecodeError,
    EnvbusError,
    NoServerError,
    UsageError,
)
from envbus.settings import PROBE_TIMEOUT_S

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
LISTEN_S = 1.3
"""A little over one beat interval: every server was heard once."""
RATE_LISTEN_S = 2.3
"""A little over two: rates are known."""
POLL_S = 0.5
AT_ONCE = 32
"""Requests under way at the same time."""
_PINGED_AT_ONCE = 8
"""More would measure each other."""


@dataclass(slots=True)
class RoundTrips:
    """What pinging one server gave."""

    server: ServerView
    seconds: list[float] = field(default_factory=list)
    error: str | None = None
    denied: bool = False
    """Whether it is this user that may not ask."""


class Operator:
    """Sees and steers the fleet under one prefix.

    Args:
        address: NATS address(es); default ENVBUS_URL, NATS_URL, then the NATS CLI's context.
        prefix: First token of all subjects.
        connect_timeout_s: How long the first connection may take.

    Raises:
        UsageError: An argument is not usable.
    """

    def __init__(
        self,
        address: str | Sequence[str] | BusOptions | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.options = resolve_bus_options(address)
        self.prefix = check_prefix(prefix)
        self.fleet = Fleet()
        self._connect_timeout_s = connect_timeout_s
        self._bus: Bus | None = None
        self._hearing = Hearing(self.fleet, self.prefix)
        self._heard_from: float | None = None

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect and begin to listen.

        Raises:
            BusUnreachableError: No NATS server answered in time.
            BusAuthError: It refused the credentials.
        """
        if self._bus is not None:
            return
        bus = self._bus = Bus.acquire(self.options)
        try:
            await bus.opened(timeout_s=self._connect_timeout_s)
            await bus.thread.run(self._hearing.open(bus.connection, Crossing(asyncio.get_running_loop())))
        except BaseException:
            await self.close()
            raise
        self._heard_from = time.monotonic()

    async def close(self) -> None:
        """Disconnect."""
        bus, self._bus = self._bus, None
        if bus is None:
            return
        try:
            await bus.thread.run(self._hearing.close(bus.connection))
        finally:
            await asyncio.to_thread(bus.release)

    # ---- seeing

    @property
    def connection(self) -> Connection:
        """The connection beneath; use it on its bus thread only, see on_bus()."""
        return self._open_bus().connection

    async def on_bus(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run something on the bus thread."""
        bus = self._open_bus()

        async def there() -> T:
            return await work(bus.connection)

        return await bus.thread.run(there())

    async def check_allowed(self) -> list[str]:
        """Wait until NATS has judged what this listens to; returns what is missed, in words.

        Raises:
            BusPermissionError: This user may not hear servers.
        """
        return await self.on_bus(self._hearing.check_allowed)

    def on_beat(self, call: Callable[[Beat], None]) -> None:
        """Hand each server's heartbeat on, once the fleet has it."""
        self._hearing.on_beat = call

    def view(self) -> FleetView:
        """The fleet as heard so far."""
        return self.fleet.view(time.monotonic())

    async def survey(self, *, listen_s: float = LISTEN_S) -> FleetView:
        """The fleet, after listening for at least this long since connect()."""
        self._open_bus()
        assert self._heard_from is not None
        await asyncio.sleep(max(0.0, self._heard_from + listen_s - time.monotonic()))
        return self.view()

    async def info(self, env: str) -> Info:
        """What one server says the env is.

        Raises:
            NoServerError: No server of the env is there.
            CallTimeoutError: No answer.
        """
        return await self._ask(Subjects(env, self.prefix).info, InfoRequest(), Info, who=f"env {env!r}")

    async def ping(self, server: ServerView, *, timeout_s: float = PROBE_TIMEOUT_S) -> float:
        """Return the seconds that a server took to answer.

        Raises:
            NoServerError: It is gone.
            CallTimeoutError: No answer.
        """
        started = time.monotonic()
        subject = Subjects(server.env, self.prefix).ctl(server.server)
        await self._request(subject, StatusRequest(), who=_name(server), timeout_s=timeout_s)
        return time.monotonic() - started

    async def round_trips(self, servers: Iterable[ServerView], count: int) -> list[RoundTrips]:
        """Ping servers, each so often; one that does not answer is asked no more."""
        found: list[RoundTrips] = []

        async def one(server: ServerView) -> None:
            trips = RoundTrips(server)
            found.append(trips)
            try:
                for _ in range(count):
                    trips.seconds.append(await self.ping(server))
            except EnvbusError as error:
                trips.error, trips.denied = str(error), isinstance(error, BusPermissionError)

        await self._each(servers, one, at_once=_PINGED_AT_ONCE)
        return sorted(found, key=lambda trips: (trips.server.env, trips.server.server))

    async def logs(self, server: ServerView, *, lines: int = 100, after: int | None = None) -> LogLines:
        """Lines of a server's log: from the controller that launched it, else from the server itself.

        Raises:
            NoServerError: Neither is there any more.
            BadRequestError: The server has no log file.
        """
        request = LogsRequest(server=server.server, lines=lines, after=after)
        if server.controller is not None:
            with contextlib.suppress(NoServerError):
                return await self._ask(
                    controller(server.controller, self.prefix), request, LogLines, who=f"controller {server.controller}"
                )
        subject = Subjects(server.env, self.prefix).ctl(server.server)
        return await self._ask(subject, request, LogLines, who=_name(server))

    async def find_ended(self, text: str) -> ServerView | None:
        """A server that is no longer seen but whose log a controller still has, by the start of its id."""
        request = LogsRequest(server=text, lines=1)
        for each in self.view().controllers:
            subject = controller(each.controller, self.prefix)
            with contextlib.suppress(BadRequestError, NoServerError, CallTimeoutError):
                log = await self._ask(subject, request, LogLines, who=f"controller {each.controller}")
                return ServerView(server=log.server, env="?", state="gone", host=each.host, controller=each.controller)
        return None

    # ---- orders

    async def drain(self, servers: Iterable[ServerView]) -> None:
        """Have servers take no more jobs, finish those they have, and end; those that are gone do not matter."""
        await self._each(servers, lambda server: self.control(server, Control(action="drain")))

    async def control(self, server: ServerView, order: Control) -> WireMessage | None:
        """Give one server an order; None if it is gone.

        Raises:
            CallTimeoutError: No answer.
        """
        subject = Subjects(server.env, self.prefix).ctl(server.server)
        try:
            return await self._request(subject, order, who=_name(server))
        except NoServerError:
            self.fleet.server_gone(server.server, time.monotonic())
            return None

    async def scale(self, env: str, replicas: int, *, host: str | None = None) -> dict[str, int]:
        """Run so many servers of an env.

        One controller: it runs them all. Several: they share them evenly, and what is left over goes to those
        that have most now. With ``host`` the number is for that host alone and the others stay as they are.

        Returns:
            Controller → servers that it was told to run.

        Raises:
            NoServerError: No controller (of that host) runs the env.
            UsageError: Fewer than none, or more than these controllers may run.
        """
        if replicas < 0:
            raise UsageError(f"replicas must be 0 or more, not {replicas}")
        there = controllers_of(self.view(), env, host=host)
        shares = spread(replicas, {each.controller: each.wants[env] for each in there})
        # Those that grow come first: the env never has fewer than before and after.
        for each in sorted(there, key=lambda each: each.wants[env] - shares[each.controller]):
            await self.scale_controller(each.controller, env, shares[each.controller])
        return shares

    async def scale_controller(self, controller_id: str, env: str, replicas: int) -> None:
        """Have one controller run so many servers of an env."""
        await self._order(controller_id, Scale(env=env, replicas=replicas))

    async def restart(self, env: str, *, host: str | None = None) -> list[str]:
        """Have the env's servers replaced one by one; returns the controllers that do it.

        Raises:
            NoServerError: No controller (of that host) runs the env.
        """
        there = [each.controller for each in controllers_of(self.view(), env, host=host)]
        for controller_id in there:
            await self._order(controller_id, Restart(env=env))
        return there

    async def retire(self, target: Target) -> list[ServerView]:
        """Have a server, or all servers of an env or a host, drain and end.

        Of an env or a host that controllers run, they are told to run 0 there, so that nothing takes the place of
        what ends. A single server is replaced by its controller.

        Returns:
            The servers that will go.

        Raises:
            UsageError: A controller decides itself how many it runs; nothing was done.
        """
        running = [] if target.kind == "server" else runs_of(self.view(), target)
        for each, env in running:
            await self.scale_controller(each.controller, env, 0)
        managed = {each.controller for each, _ in running}
        await self.drain(server for server in target.servers if server.controller not in managed)
        return list(target.servers)

    async def stop(self, target: Target | None) -> list[ServerView]:
        """Like retire(), but of a host its controllers end too; None stops every controller and server.

        Returns:
            The servers that will go.
        """
        if target is not None and target.kind != "host":
            return await self.retire(target)
        view = self.view()
        servers = list(target.servers if target is not None else (s for s in view.servers if s.state in PRESENT))
        ending = {
            each.controller
            for each in view.controllers
            if each.state != "gone" and (target is None or each.host == target.name)
        }
        for controller_id in sorted(ending):
            await self._stop_controller(controller_id)
        await self.drain(server for server in servers if server.controller not in ending)
        return servers

    async def until_gone(
        self, servers: Iterable[ServerView], *, timeout_s: float, progress: Callable[[list[ServerView]], None]
    ) -> list[ServerView]:
        """Wait until servers are gone.

        Args:
            servers: Which.
            timeout_s: How long.
            progress: Gets what is left, about twice a second.

        Returns:
            Those that are still there after the time.
        """
        left = {server.server: server for server in servers}
        give_up_at = time.monotonic() + timeout_s
        while left:
            await self._each(list(left.values()), self._look)
            now = self.view()
            left = {name: here for name in left if (here := now.server(name)) and here.state in PRESENT}
            progress(list(left.values()))
            if not left or time.monotonic() >= give_up_at:
                break
            await asyncio.sleep(POLL_S)
        return list(left.values())

    async def _look(self, server: ServerView) -> None:
        """Find out at once, by the 503 of NATS, that a server has left."""
        try:
            await self.ping(server)
        except NoServerError:
            self.fleet.server_gone(server.server, time.monotonic())
        except EnvbusError:
            pass  # busy or stalled: its beats, or their absence, decide

    async def _stop_controller(self, controller_id: str) -> None:
        with contextlib.suppress(NoServerError):
            await self._order(controller_id, StopController())

    async def _order(self, controller_id: str, order: WireMessage) -> None:
        await self._request(controller(controller_id, self.prefix), order, who=f"controller {controller_id}")

    async def _each(
        self, servers: Iterable[ServerView], act: Callable[[ServerView], Awaitable[Any]], *, at_once: int = AT_ONCE
    ) -> None:
        room = asyncio.Semaphore(at_once)

        async def one(server: ServerView) -> None:
            async with room:
                await act(server)

        outcomes = await asyncio.gather(*(one(server) for server in servers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    # ---- the bus

    async def _ask(self, subject: str, request: WireMessage, kind: type[T], *, who: str) -> T:
        answer = await self._request(subject, request, who=who)
        if not isinstance(answer, kind):
            raise DecodeError(f"{who} answered with {answer.kind!r}; do its version and this one fit together?")
        return answer

    async def _request(
        self, subject: str, request: WireMessage, *, who: str, timeout_s: float = PROBE_TIMEOUT_S
    ) -> WireMessage:
        data = pack(request)
        try:
            answer = parse(await self.on_bus(lambda bus: bus.request(subject, data, timeout_s=timeout_s)))
        except NoServerError as error:
            raise NoServerError(f"{who} is not on the bus; see: envbus ls") from error
        except TimeoutError as error:
            if (trouble := self._open_bus().connection.trouble) is not None:
                raise BusAuthError(str(trouble)) from error
            raise CallTimeoutError(
                f"{who} gave no answer within {timeout_s:g} s: it stalls, or is cut off; see: envbus ls"
            ) from error
        if isinstance(answer, Failure):
            raise from_failure(answer)
        return answer

    def _open_bus(self) -> Bus:
        if self._bus is None:
            raise UsageError("this Operator is not connected")
        return self._bus


def _name(server: ServerView) -> str:
    return f"server {server.server} of env {server.env!r}"
