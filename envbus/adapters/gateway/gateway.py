"""A gateway: listeners for several envs of one bus in one process. Imports pyzmq: import it only where that is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Self

import zmq

from envbus.adapters.gateway.limits import GatewayLimits
from envbus.adapters.gateway.listener import Listener
from envbus.adapters.gateway.router_socket import LINGER_MS
from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.subjects import DEFAULT_PREFIX
from envbus.client import NATSEnvClient
from envbus.settings import ClientSettings

NO_SERVER_TIMEOUT_S = 600.0
"""Unless ENVBUS_CLIENT_NO_SERVER_TIMEOUT_S says otherwise: as long as the library's clients wait for their server."""


class Gateway:
    """Listens while it is entered.

    Args:
        places: Pairs of an address to listen on and the env whose fleet answers there, by its name on the bus.
        address: NATS address(es); default as for NATSEnvClient.
        prefix: First token of all subjects.
        limits: Sizes and times of each listener.
        settings: Of its clients on the bus.

    Raises:
        UsageError: An address cannot be used.
        BusError: NATS is not there.
    """

    def __init__(
        self,
        places: Sequence[tuple[str, str]],
        address: str | Sequence[str] | BusOptions | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        limits: GatewayLimits | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        self._places = list(places)
        self._options = resolve_bus_options(address)
        self._prefix = prefix
        self._limits = limits or GatewayLimits()
        self._settings = settings or _default_settings()
        self.listeners: list[Listener] = []

    async def __aenter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            for listen, env in self._places:
                listener = Listener(partial(self._client, env), self._limits)
                await listener.open(self._context, listen)
                self.listeners.append(listener)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    def troubles(self) -> dict[str, str]:
        """Envs whose fleet takes no rollouts, and why."""
        pairs = zip(self._places, self.listeners, strict=False)
        return {env: listener.trouble for (_, env), listener in pairs if listener.trouble is not None}

    def _client(self, env: str) -> NATSEnvClient:
        return NATSEnvClient(self._options, env, name=env, prefix=self._prefix, settings=self._settings)

    async def _close(self) -> None:
        await asyncio.gather(*(listener.close() for listener in self.listeners))
        await asyncio.to_thread(self._context.destroy, LINGER_MS)  # waits for what was sent just now


def _default_settings() -> ClientSettings:
    settings = ClientSettings()
    if "no_server_timeout_s" in settings.model_fields_set:
        return settings
    return settings.model_copy(update={"no_server_timeout_s": NO_SERVER_TIMEOUT_S})
