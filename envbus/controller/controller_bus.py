"""The bus of a controller: at the address that it is given, or a NATS server of its own that it keeps running."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from envbus.bus.address import BusOptions, find_bus_options, resolve_bus_options
from envbus.bus.connection import Connection
from envbus.bus.embedded import EmbeddedNats
from envbus.controller.spec import FleetSpec
from envbus.errors import EnvbusError, UsageError

NATS_RETRY_S = 5.0


class StoppedEarlyError(Exception):
    """The controller was stopped while it waited for NATS."""


class ControllerBus:
    """Finds NATS, or starts it.

    Args:
        spec: The fleet.
        say: Gets what an operator should read: a text and its level.

    Raises:
        UsageError: The address is of no use.
    """

    def __init__(self, spec: FleetSpec, *, say: Callable[[str, Any], None]) -> None:
        self._spec = spec
        self._say = say
        self._options = bus_options(spec)
        self.nats: EmbeddedNats | None = None
        """The NATS server of its own, if it has one."""
        self._retry_at = 0.0

    @contextlib.asynccontextmanager
    async def open(self, *, until: asyncio.Event) -> AsyncIterator[tuple[Connection, dict[str, str]]]:
        """The connection, and the variables that tell servers where NATS is and as whom to connect.

        Waits for a NATS that is not there yet.

        Args:
            until: Ends that wait.

        Raises:
            StoppedEarlyError: It was ended.
            BusAuthError: NATS refused the credentials.
        """
        async with contextlib.AsyncExitStack() as stack:
            options, address = self._options, self._spec.bus.address
            if options is None:
                self.nats = await stack.enter_async_context(self._embedded())
                address = self.nats.url
                options = find_bus_options(address)
                self._say(f"NATS is at {address}; from another terminal here: export ENVBUS_URL={address}", "info")
            assert options is not None
            connection = Connection(options, name=f"envbus-controller-{self._spec.controller_id}")
            stack.push_async_callback(connection.close)
            if not await _done_before(until, connection.open(timeout_s=None)):
                raise StoppedEarlyError
            yield connection, self._variables(address)

    def _variables(self, address: str | None) -> dict[str, str]:
        """For servers: what the fleet file says counts more than what is in the controller's environment."""
        context = self._spec.bus.server_context or self._spec.bus.context
        if context is not None:
            return {"ENVBUS_CONTEXT": context, "ENVBUS_URL": "", "NATS_URL": ""}
        return {} if address is None else {"ENVBUS_URL": address, "NATS_URL": ""}

    async def keep(self) -> None:
        """Start the NATS server of its own again if it has ended."""
        if self.nats is None or self.nats.is_running or time.monotonic() < self._retry_at:
            return
        self._say("the embedded NATS server has ended; it is started again", "error")
        try:
            await self.nats.restart()
        except EnvbusError as error:
            self._say(f"it does not start: {error}", "error")
            self._retry_at = time.monotonic() + NATS_RETRY_S

    def _embedded(self) -> EmbeddedNats:
        bus, lines = self._spec.bus, []
        if bus.websocket_port is not None:
            lines.append(f'websocket {{ host: "127.0.0.1", port: {bus.websocket_port or -1}, no_tls: true }}')
        if bus.monitoring_port is not None:
            lines.append(f'http: "127.0.0.1:{bus.monitoring_port or -1}"')
        log_file = self._spec.controller.log_dir / "nats-server.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        return EmbeddedNats(port=bus.port, config="\n".join(lines) or None, log_file=log_file)


async def _done_before(until: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await some work unless an event comes first; returns whether it is done."""
    working, ended = asyncio.ensure_future(work), asyncio.ensure_future(until.wait())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
        return working.done()
    finally:
        working.cancel()
        ended.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)


def bus_options(spec: FleetSpec) -> BusOptions | None:
    """Where NATS is; None: embedded.

    Raises:
        UsageError: What the fleet file or the environment says of it is of no use.
    """
    if spec.bus.embedded:
        return None
    if spec.bus.server_context is not None:
        resolve_bus_options(context=spec.bus.server_context)
    options = find_bus_options(spec.bus.address, context=spec.bus.context)
    if options is None and spec.controller.adopt:
        raise UsageError(
            "adopt needs a bus that outlives the controller: give [bus] address or context, or set ENVBUS_URL"
        )
    return options
