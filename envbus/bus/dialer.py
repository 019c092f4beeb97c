"""Makes connected nats-py clients: one attempt at a time, with errors that say what is wrong.

A first attempt ends with the first refusal, or once every server failed; a client
that was connected reconnects for ever by itself, with jittered pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import nats.errors
from nats.aio.client import Client, Server, Srv
from nats.aio.transport import TcpTransport

from envbus.bus.address import BusOptions
from envbus.errors import BusAuthError, BusUnreachableError

PING_INTERVAL_S = 5
MAX_PINGS_OUT = 2
RECONNECT_MAX_S = 4.0
RETURN_S = 2.0
CLOSE_TIMEOUT_S = 2
ATTEMPT_TIMEOUT_S = 5.0
PENDING_BYTES = 64 * 1024 * 1024
"""What may wait to be written to the socket."""
NONSENSE_ERRORS = (ValueError, TypeError, AttributeError, LookupError)
"""What nats-py raises at a greeting that is none of NATS."""
FIRST_ERRORS = (TimeoutError, nats.errors.Error, OSError, *NONSENSE_ERRORS)


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
        self._failures = 0
        self._schemes = {server.partition(":")[0] for server in options.servers}
        self._client: SturdyClient | None = None

    async def dial(self, timeout_s: float) -> SturdyClient:
        """Return a connected client: to one of the address's servers, or of those that they told of.

        Raises:
            BusAuthError: The credentials were refused.
            BusUnreachableError: No server answered in time, or none that is NATS.
        """
        client = SturdyClient(self._discovered)
        handed_over = False

        async def closed() -> None:
            if handed_over:
                await self._on_closed()

        self._errors.clear()
        self._failures = 0
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
        self._client = client
        return client

    def connected(self) -> None:
        """The next pause between two tries is short again."""
        self._tries = 0

    async def _connect(self, client: SturdyClient, closed: Callable[[], Awaitable[None]]) -> None:
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
        self._failures += 1
        if _is_refusal(error) or self._failures >= len(self._options.servers) + len(self._discovered):
            self._hopeless.set()
        del self._errors[:-8]
        self._on_error(error)

    def _explained(self, error: Exception) -> BusAuthError | BusUnreachableError:
        if any(_is_refusal(cause) for cause in [*self._errors, error]):
            return BusAuthError(
                f"NATS at {self._options.describe()} refused the credentials; check user, password, token, nkey or "
                "creds"
            )
        # A certificate that is not accepted is a ValueError, too.
        if isinstance(error, NONSENSE_ERRORS) and not isinstance(error, OSError):
            return BusUnreachableError("what answers there does not speak NATS; check the port")
        cause = self._errors[-1] if self._errors else error
        return BusUnreachableError(str(cause) or type(cause).__name__)

    def _choose_server(self, servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
        """Those that failed least often first, so that each is tried before one is tried again."""
        self._tries += 1
        # nats-py takes the cluster's WebSocket ports for ports of plain NATS.
        usable = [server for server in servers if server.uri.scheme in self._schemes]
        fewest = min(server.reconnects for server in usable)
        return random.choice([one for one in usable if one.reconnects == fewest]), backoff_s(self._tries)

    @property
    def _discovered(self) -> list[Srv]:
        """Servers of the cluster that the last client was told of: the address's own may be gone for good."""
        pool = self._client._server_pool if self._client is not None else []
        return [server for server in pool if server.discovered and server.uri.scheme in self._schemes]


class SturdyClient(Client):
    """Reads on after a message that anybody may send and that nats-py 2.16 stops reading at, for good.

    Leaves no socket open once it is given up: nats-py's close() and its reconnecting may cross.

    Args:
        discovered: More servers to connect to, beside those of the address.
    """

    def __init__(self, discovered: Iterable[Srv]) -> None:
        super().__init__()
        self._discovered = [Srv(server.uri, discovered=True, tls_name=server.tls_name) for server in discovered]
        self._writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
        self.is_given_up = False

    def abort_connections(self) -> None:
        """Drop what close() has left connected."""
        for writer in list(self._writers):
            if not writer.is_closing():
                writer.transport.abort()

    async def _connect_to_server(self, s: Srv) -> None:
        await super()._connect_to_server(s)
        if type(self._transport) is TcpTransport:  # one that is not connected counts as none, so not before
            self._transport.__class__ = _QuietTransport
        writer = getattr(self._transport, "_io_writer", None)  # a WebSocket has none
        if writer is not None:
            self._writers.add(writer)
            if self.is_given_up:
                self.abort_connections()
                raise nats.errors.ConnectionClosedError

    async def _process_pong(self) -> None:
        # The wait for this one may have timed out: to set its result then would end the reading.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _setup_server_pool(self, connect_url: list[str]) -> None:
        super()._setup_server_pool(connect_url)
        self._server_pool += self._discovered

    async def _process_err(self, err_msg: str) -> None:
        if "permissions violation" not in err_msg:
            await super()._process_err(err_msg)
            return
        # nats-py's parser has put it in lower case; the subjects of two envs may differ in nothing but case.
        said = self._ps.buf.partition(b"\r\n")[0].decode("utf-8", "replace")
        await self._error_cb(nats.errors.Error(f"nats: {said.partition(' ')[2]}"))

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except (IndexError, ValueError):
            return None
        return found

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> object:
        return super()._build_message(sid, _as_utf8(subject), _as_utf8(reply), data, headers)


class _QuietTransport(TcpTransport):
    """Tells asyncio's stream that it is encrypted: else asyncio warns at the end of each connection."""

    async def connect_tls(self, *args: Any, **kwargs: Any) -> None:
        await super().connect_tls(*args, **kwargs)
        self._io_writer._protocol._over_ssl = True  # type: ignore[union-attr]


def _as_utf8(subject: bytes) -> bytes:
    return subject.decode("utf-8", "replace").encode()


async def close_client(client: SturdyClient) -> None:
    """Close a client; bounded, as nats-py may wait for ever for a peer that left in mid-handshake."""
    client.is_given_up = True
    try:
        with contextlib.suppress(*FIRST_ERRORS):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
    finally:
        client.abort_connections()


def backoff_s(tries: int) -> float:
    """Return seconds to wait before the next try: doubling from 0.1 s, jittered, bounded."""
    return random.uniform(0.5, 1.0) * min(RECONNECT_MAX_S, 0.1 * 2.0 ** min(tries - 1, 10))


def return_after_s(outage_s: float) -> float:
    """Return for how long after an outage others may still be away: their last pause between two tries, and more."""
    return min(outage_s, RECONNECT_MAX_S) + RETURN_S


def needs_new_client(error: BaseException) -> bool:
    """Whether nats-py's own reconnecting is in vain: it keeps the credentials and TLS files that it began with."""
    return _is_refusal(error) or isinstance(error, ssl.SSLError)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower()
