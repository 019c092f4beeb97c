"""A tiny HTTP endpoint for metrics, health and the dashboard: GET and HEAD, one answer per connection.

Everything is bounded: the size and time of a request, the connections, how long
a slow reader may take. It serves what its routes give and knows nothing of the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from envbus.errors import UsageError

log = logging.getLogger("envbus.http")

MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 100
READ_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    """A request; names of headers are in lower case."""

    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """An answer."""

    body: bytes
    status: int = 200
    content_type: str = PLAIN
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventStream:
    """An answer that goes on: each text is sent as the data of one server-sent event."""

    events: AsyncGenerator[str, None]
    retry_ms: int = 1000
    """How long a browser waits before it connects again."""


Route = Callable[[Request], Response | EventStream]
"""Called on the endpoint's loop; must not wait."""


async def start_http_endpoint(
    port: int, routes: Mapping[str, Route], *, host: str = "0.0.0.0", only_as: Collection[str] = ()
) -> HttpEndpoint:
    """Listen.

    Args:
        port: 0 takes a free one.
        routes: What answers each path.
        host: Address to listen on.
        only_as: Names of this host by which it may be asked; empty: any. Without it a page from elsewhere can
            have its own name point here and read what it likes in a visitor's browser.

    Raises:
        UsageError: The address cannot be listened on.
    """
    endpoint = HttpEndpoint(routes, only_as)
    await endpoint._listen(host, port)
    return endpoint


class HttpEndpoint:
    """A listening endpoint, made by start_http_endpoint."""

    def __init__(self, routes: Mapping[str, Route], only_as: Collection[str] = ()) -> None:
        self._routes = dict(routes)
        self._only_as = frozenset(only_as)
        self._connections: set[asyncio.Task[None]] = set()

    async def _listen(self, host: str, port: int) -> None:
        try:
            self._server = await asyncio.start_server(self._on_connection, host, port, limit=MAX_HEAD_BYTES)
        except (OSError, OverflowError) as error:
            raise UsageError(f"cannot listen on {host} port {port}: {error}; choose another port or host") from error

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end all connections."""
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError):
            pass  # the other side left or took too long
        except Exception:
            log.exception("an HTTP request could not be answered")
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        crowded = len(self._connections) > MAX_CONNECTIONS
        try:
            async with asyncio.timeout(READ_TIMEOUT_S / 10 if crowded else READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, request = _parse(head)
        except (ValueError, asyncio.LimitOverrunError):
            await _send(writer, _whole(_error(400), with_body=True))
            return
        answer = _error(503) if crowded else self._route(method, request)
        if isinstance(answer, EventStream):
            await self._stream(answer, reader, writer)
        else:
            await _send(writer, _whole(answer, with_body=method != "HEAD"))

    def _route(self, method: str, request: Request) -> Response | EventStream:
        if self._only_as and _host_name(request.headers.get("host", "")) not in self._only_as:
            return _error(421)
        route = self._routes.get(request.path)
        if route is None:
            return _error(404)
        if method not in ("GET", "HEAD"):
            return _error(405, {"Allow": "GET, HEAD"})
        return route(request)

    async def _stream(self, stream: EventStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send events until they end or the other side leaves, which shows as the end of what it sends."""
        sending = asyncio.ensure_future(_send_events(stream, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)


async def _send_events(stream: EventStream, writer: asyncio.StreamWriter) -> None:
    head = _head(200, "text/event-stream", {"Cache-Control": "no-store"})
    await _send(writer, head + f"retry: {stream.retry_ms}\n\n".encode())
    async with contextlib.aclosing(stream.events) as events:
        async for event in events:
            lines = "".join(f"data: {line}\n" for line in event.splitlines())
            await _send(writer, f"{lines}\n".encode())


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await writer.drain()


def _parse(head: bytes) -> tuple[str, Request]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP/1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return method, Request(target.partition("?")[0], headers)


def _host_name(host: str) -> str:
    """A Host header without its port."""
    return host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host


def _error(status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(f"{HTTPStatus(status).phrase}\n".encode(), status, headers=headers or {})


def _whole(response: Response, *, with_body: bool) -> bytes:
    headers = {"Content-Length": str(len(response.body)), **response.headers}
    return _head(response.status, response.content_type, headers) + (response.body if with_body else b"")


def _head(status: int, content_type: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {content_type}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
