"""Makes connected nats-py clients: one attempt at a time, with errors that say what is wrong.

A first attempt ends with the first refusal, or once every server failed; a client
that was connected reconnects for ever by itself, with jittered pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.client import Client, Server

from envbus.bus.address import BusOptions
from envbus.errors import BusAuthError, BusUnreachableError

PING_INTERVAL_S = 5
MAX_PINGS_OUT = 2
RECONNECT_MAX_S = 4.0
CLOSE_TIMEOUT_S = 2
ATTEMPT_TIMEOUT_S = 5.0
PENDING_BYTES = 64 * 1024 * 1024
"""What may wait to be written to the socket."""
FIRST_ERRORS = (TimeoutError, nats.errors.Error, OSError, ValueError)


class Dialer:
    """Connects to the servers of one address.

    Args:
        on_error: Gets every error that nats-py reports on the side.
        on_disconnected: Awaited when a connection is lost.
        on_reconnected: Awaited when it is back.
        on_closed: Awaited when nats-py has given a client up for good that had been connected.
    """

    def __init__(
        self,
        options: BusOptions,
        *,
        name: str,
        on_error: Callable[[Exception], None],
        on_disconnected: Callable[[], Awaitable[None]],
        on_reconnected: Callable[[], Awaitable[None]],
        on_closed: Callable[[], Awaitable[None]],
    ) -> None:
        self._options = options
        self._name = name
        self._on_error = on_error
        self._on_closed = on_closed
        self._callbacks: dict[str, Any] = {"disconnected_cb": on_disconnected, "reconnected_cb": on_reconnected}
        self._errors: list[Exception] = []
        self._hopeless = asyncio.Event()
        self._tries = 0

    async def dial(self, timeout_s: float) -> Client:
        """Return a connected client.

        Raises:
            BusAuthError: The credentials were refused.
            BusUnreachableError: No server answered in time, or none that is NATS.
        """
        client = Client()
        handed_over = False

        async def closed() -> None:
            if handed_over:
                await self._on_closed()

        self._errors.clear()
        self._hopeless.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect(client, closed)
        except FIRST_ERRORS as error:
            await close_client(client)
            raise self._explained(error) from error
        except asyncio.CancelledError:
            await close_client(client)
            raise
        handed_over = True
        return client

    def connected(self) -> None:
        """The next pause between two tries is short again."""
        self._tries = 0

    async def _connect(self, client: Client, closed: Callable[[], Awaitable[None]]) -> None:
        """Await the first connection, but not nats-py's retries once there is no hope."""
        connecting = asyncio.ensure_future(
            client.connect(
                **self._options.nats_kwargs(),
                name=self._name,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                connect_timeout=2,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=MAX_PINGS_OUT,
                reconnect_to_server_handler=self._choose_server,
                error_cb=self._note_error,
                pending_size=PENDING_BYTES,
                closed_cb=closed,
                **self._callbacks,
            )
        )
        hopeless = asyncio.ensure_future(self._hopeless.wait())
        try:
            await asyncio.wait({connecting, hopeless}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise self._errors[-1]
            await connecting
        finally:
            connecting.cancel()
            hopeless.cancel()
            await asyncio.gather(connecting, hopeless, return_exceptions=True)

    async def _note_error(self, error: Exception) -> None:
        self._errors.append(error)
        if _is_refusal(error) or len(self._errors) >= len(self._options.servers):
            self._hopeless.set()
        del self._errors[:-8]
        self._on_error(error)

    def _explained(self, error: Exception) -> BusAuthError | BusUnreachableError:
        if any(_is_refusal(cause) for cause in [*self._errors, error]):
            return BusAuthError(
                f"NATS at {self._options.describe()} refused the credentials; check user, password, token or creds"
            )
        cause = self._errors[-1] if self._errors else error
        return BusUnreachableError(str(cause) or type(cause).__name__)

    def _choose_server(self, servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
        self._tries += 1
        return random.choice(servers), backoff_s(self._tries)


async def close_client(client: Client) -> None:
    """Close a client; bounded, as nats-py may wait for ever for a peer that left in mid-handshake."""
    with contextlib.suppress(*FIRST_ERRORS):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()


def backoff_s(tries: int) -> float:
    """Return seconds to wait before the next try: doubling from 0.1 s, jittered, bounded."""
    return random.uniform(0.5, 1.0) * min(RECONNECT_MAX_S, 0.1 * 2.0 ** min(tries - 1, 10))


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower()
