"""A model endpoint on loopback that misbehaves as it is told, request by request, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from envbus.types import ClientConfig, EndpointConfig

Act = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadEndpoint:
    """Does one act for each request, in order; the last one from then on. Serves on a thread and loop of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.requests: list[web.Request] = []
        self.host = host
        self.port = 0
        self.times_s: list[float] = []
        self.asked = threading.Semaphore(0)
        """Released once for each request."""
        self.acts: list[Act] = [answer()]
        self._thread: threading.Thread | None = None

    def will(self, *acts: Act) -> BadEndpoint:
        self.acts = list(acts)
        return self

    def open(self) -> None:
        """Listen; after a close() on the same port."""
        listening: Future[int] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen(listening)))
        self._thread.start()
        self.port = listening.result(10)

    def close(self) -> None:
        """End all connections and refuse new ones."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self.stop_soon()
            self._thread.join(10)
            self._thread = None

    def stop_soon(self) -> None:
        """Begin to close, from any thread."""
        self._loop.call_soon_threadsafe(self._closing.set)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def endpoint(self, **settings: Any) -> EndpointConfig:
        return EndpointConfig(**{"api_base_url": self.url, "api_key_var": None, "timeout": 20, **settings})

    def config(self, **settings: Any) -> ClientConfig:
        return ClientConfig(**self.endpoint(**settings).model_dump())

    async def _listen(self, listening: Future[int]) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port, reuse_address=True).start()
            listening.set_result(runner.addresses[0][1])
            await self._closing.wait()
        finally:
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
        self.requests.append(request)
        self.times_s.append(time.monotonic())
        self.asked.release()
        return await act(request)


MakeEndpoint = Callable[[], BadEndpoint]


def completion(text: str = "hello") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def answer(body: Any = None, *, status: int = 200, content_type: str = "application/json", **headers: str) -> Act:
    """A whole answer: a completion, or whatever body is given."""
    data = body if isinstance(body, bytes) else json.dumps(completion() if body is None else body).encode()

    async def act(request: web.Request) -> web.StreamResponse:
        return web.Response(body=data, status=status, content_type=content_type, headers=_named(headers))

    return act


def error(status: int, message: str = "no", **headers: str) -> Act:
    return answer({"error": {"message": message}}, status=status, **headers)


async def hang(request: web.Request) -> web.StreamResponse:
    """Take the request and say nothing."""
    await asyncio.Event().wait()
    raise AssertionError


async def hang_after_headers(request: web.Request) -> web.StreamResponse:
    response = await _begun(request)
    await response.write(b'{"id": ')
    return await hang(request)


async def drip(request: web.Request) -> web.StreamResponse:
    """A byte now and then, without end: no pause is long."""
    response = await _begun(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


async def cut(request: web.Request) -> web.StreamResponse:
    """Break the connection in the middle of the body."""
    response = await _begun(request, length=1000)
    await response.write(b'{"id": "x", "choi')
    assert request.transport is not None
    request.transport.close()
    return response


async def hang_up(request: web.Request) -> web.StreamResponse:
    """Break the connection before any answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def raw(data: bytes) -> Act:
    """Write these bytes instead of an answer, and break the connection."""

    async def act(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(data)
        request.transport.close()
        return web.Response()

    return act


def flood(piece: bytes, *, first: bytes = b"", **headers: str) -> Act:
    """Send without end."""

    async def act(request: web.Request) -> web.StreamResponse:
        response = await _begun(request, **headers)
        await response.write(first)
        while True:
            await response.write(piece)

    return act


async def _begun(request: web.Request, *, length: int | None = None, **headers: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", **_named(headers)})
    response.content_length = length
    await response.prepare(request)
    return response


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
