"""HTTP pages for metrics, health and the dashboard: GET and HEAD, one answer per connection.

aiohttp speaks HTTP; this says who may ask and bounds the time and number of the connections.
It serves what its routes give and knows nothing of the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web

from envbus.errors import UsageError

log = logging.getLogger("envbus.http")
_protocol_log = logging.getLogger("envbus.http.protocol")
_protocol_log.setLevel(logging.CRITICAL)  # a stranger's bytes that are no request get a 400; they are no error here

MAX_CONNECTIONS = 100
READ_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Request:
    """A request; names of headers in any case."""

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
        self._answering: set[asyncio.Task[object]] = set()
        self._server = web.Server(
            self._answer,
            handler_cancellation=True,
            access_log=None,
            logger=_protocol_log,
            keepalive_timeout=READ_TIMEOUT_S,
        )
        self._runner = web.ServerRunner(self._server, shutdown_timeout=CLOSE_TIMEOUT_S)

    async def _listen(self, host: str, port: int) -> None:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise UsageError(f"cannot listen on {host} port {port}: {error}; choose another port or host") from error

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening and end all connections."""
        for site in self._runner.sites:
            await site.stop()
        # A stream never ends by itself, and aiohttp would first wait for it.
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await self._runner.cleanup()

    async def _answer(self, asked: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        try:
            answer = self._route(asked.method, Request(asked.path, asked.headers))
            return await (_stream(asked, answer) if isinstance(answer, EventStream) else _send(asked, answer))
        except OSError:
            pass  # the other side left or took too long
        except Exception:
            log.exception("an HTTP request could not be answered")
        if asked.transport is not None:
            asked.transport.abort()
        return web.Response()

    def _route(self, method: str, request: Request) -> Response | EventStream:
        if len(self._server.connections) > MAX_CONNECTIONS:
            return _error(503)
        if self._only_as and _host_name(request.headers.get("host", "")) not in self._only_as:
            return _error(421)
        route = self._routes.get(request.path)
        if route is None:
            return _error(404)
        if method not in ("GET", "HEAD"):
            return _error(405, {"Allow": "GET, HEAD"})
        return route(request)


async def _send(asked: web.BaseRequest, answer: Response) -> web.Response:
    headers = {"Content-Type": answer.content_type, "Server": "envbus", **answer.headers}
    response = web.Response(body=answer.body, status=answer.status, headers=headers)
    response.force_close()
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await response.prepare(asked)
        await response.write_eof()
    return response


async def _stream(asked: web.BaseRequest, stream: EventStream) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Server": "envbus", "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    response.force_close()
    await response.prepare(asked)
    async with contextlib.aclosing(stream.events) as events:
        if asked.method == "HEAD":
            return response
        await _write(response, f"retry: {stream.retry_ms}\n\n")
        async for event in events:
            lines = "".join(f"data: {line}\n" for line in event.splitlines())
            await _write(response, f"{lines}\n")
    return response


async def _write(response: web.StreamResponse, text: str) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await response.write(text.encode())


def _host_name(host: str) -> str:
    """A Host header without its port."""
    return host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host


def _error(status: int, headers: Mapping[str, str] | None = None) -> Response:
    return Response(f"{HTTPStatus(status).phrase}\n".encode(), status, headers=headers or {})
