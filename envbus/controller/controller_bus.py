"""The bus of a controller: at the address that it is given, or a NATS server of its own that it keeps running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from envbus.bus.address import BusOptions, find_bus_options
from envbus.bus.connection import Connection
from envbus.bus.embedded import EmbeddedNats
from envbus.controller.spec import FleetSpec
from envbus.errors import EnvbusError, UsageError

CONNECT_TIMEOUT_S = 10.0
NATS_RETRY_S = 5.0


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
        self._options = _bus_options(spec)
        self.nats: EmbeddedNats | None = None
        """The NATS server of its own, if it has one."""
        self._retry_at = 0.0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Connection, str | None]]:
        """The connection, and the address that servers need to be told."""
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
            await connection.open(timeout_s=CONNECT_TIMEOUT_S)
            yield connection, address

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


def _bus_options(spec: FleetSpec) -> BusOptions | None:
    """Where NATS is; None: embedded."""
    if spec.bus.embedded:
        return None
    options = find_bus_options(spec.bus.address)
    if options is None and spec.controller.adopt:
        raise UsageError("adopt needs a bus that outlives the controller: give [bus] address, or set ENVBUS_URL")
    return options
