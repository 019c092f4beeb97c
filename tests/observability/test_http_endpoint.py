"""The HTTP endpoint: what it answers, and what it does not let strangers do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
from web import get, raw

from envbus import http_endpoint
from envbus.errors import UsageError
from envbus.http_endpoint import EventStream, HttpEndpoint, Request, Response, start_http_endpoint


class Events:
    """A stream that says when it was closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            yield "one"
            yield "two\nlines"
            await asyncio.Event().wait()
        finally:
            self.closed.set()


@asynccontextmanager
async def listening(**routes: object) -> AsyncIterator[HttpEndpoint]:
    paths = {f"/{name}": route for name, route in routes.items()}
    endpoint = await start_http_endpoint(0, paths, host="127.0.0.1")  # type: ignore[arg-type]
    try:
        yield endpoint
    finally:
        await endpoint.close()


def hello(request: Request) -> Response:
    return Response(f"hello {request.headers.get('x-name', '')}".encode(), headers={"X-More": "yes"})


def broken(request: Request) -> Response:
    raise ValueError("a bug")


async def test_routes_are_answered_and_nothing_else() -> None:
    async with listening(hello=hello) as endpoint:
        answer = await get(endpoint.port, "/hello?a=1", headers={"X-Name": "you"})
        assert (answer.status, answer.body, answer.headers["x-more"]) == (200, "hello you", "yes")
        assert (await get(endpoint.port, "/other")).status == 404
        assert (await get(endpoint.port, "/hello", method="POST")).status == 405
        head = await get(endpoint.port, "/hello", method="HEAD")
        assert (head.status, head.body, head.headers["content-length"]) == (200, "", "6")


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / SPDY/3\r\nHost: a\r\n\r\n",
        b"\x00\xff" * 10 + b"\r\n\r\n",
        b"x" * 70_000,
        b"GET /hello HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 70_000,
    ],
)
async def test_what_is_no_request_is_refused(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with listening(hello=hello) as endpoint:
        assert (await raw(endpoint.port, sent)).partition(b" ")[2].startswith(b"400 ")
    assert not caplog.records


async def test_silence_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "READ_TIMEOUT_S", 0.1)
    async with listening(hello=hello) as endpoint:
        assert await raw(endpoint.port, b"GET /hello HT") == b""


async def test_a_reader_that_is_too_slow_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "WRITE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_endpoint, "MAX_CONNECTIONS", 1)
    body = b"x" * 50_000_000
    async with listening(large=lambda request: Response(body), hello=hello) as endpoint:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(30):
            while (await get(endpoint.port, "/hello")).status == 503:  # until the slow one is gone
                pass
        writer.close()


async def test_too_many_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoint, "MAX_CONNECTIONS", 1)
    async with listening(hello=hello) as endpoint:
        _, first = await asyncio.open_connection("127.0.0.1", endpoint.port)
        with contextlib.closing(first):
            assert (await get(endpoint.port, "/hello")).status == 503


async def test_a_broken_route_ends_its_connection_only(caplog: pytest.LogCaptureFixture) -> None:
    async with listening(broken=broken, hello=hello) as endpoint:
        assert await raw(endpoint.port, b"GET /broken HTTP/1.1\r\nHost: a\r\n\r\n") == b""
        assert (await get(endpoint.port, "/hello")).status == 200
    assert "a bug" in caplog.text


async def test_events_are_streamed_until_the_reader_leaves() -> None:
    events = Events()
    async with listening(events=lambda request: EventStream(events.stream())) as endpoint:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
        told = await reader.readuntil(b"data: two\ndata: lines\n\n")
        assert b"text/event-stream" in told
        assert b"data: one\n\n" in told
        head = await get(endpoint.port, "/events", method="HEAD")
        assert (head.headers["content-type"], head.body) == ("text/event-stream", "")
        assert not events.closed.is_set()
        writer.close()
        await asyncio.wait_for(events.closed.wait(), 5)


async def test_close_ends_streams() -> None:
    events = Events()
    async with listening(events=lambda request: EventStream(events.stream())) as endpoint:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"data: one\n\n")
    assert events.closed.is_set()
    await asyncio.wait_for(reader.read(), 5)
    writer.close()


async def test_a_port_in_use_is_a_usage_error() -> None:
    async with listening(hello=hello) as endpoint:
        with pytest.raises(UsageError, match=f"port {endpoint.port}.*choose another"):
            await start_http_endpoint(endpoint.port, {}, host="127.0.0.1")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:80", 200), ("[::1]:80", 200), ("evil.example", 421), ("localhost.evil:80", 421)],
)
async def test_names_of_others_are_refused_where_asked(host: str, status: int) -> None:
    """A name that its owner points at this host must not open it to pages from there."""
    names = ("localhost", "[::1]")
    endpoint = await start_http_endpoint(0, {"/hello": hello}, host="127.0.0.1", only_as=names)
    try:
        assert (await get(endpoint.port, "/hello", headers={"Host": host})).status == status
    finally:
        await endpoint.close()
