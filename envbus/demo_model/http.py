"""HTTP as OpenAI clients expect it, on top of aiohttp: JSON bodies, errors as JSON, streams of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

WRITE_TIMEOUT_S = 30.0
"""How long the client of a stream may take to read it."""


class HttpError(Exception):
    """An answer with an error status, in the form that OpenAI clients read."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        self.status = status
        self.code = code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer errors, also those of aiohttp, in the form that OpenAI clients read."""
    try:
        return await handler(request)
    except HttpError as exc:
        error = exc
    except web.HTTPException as exc:
        error = HttpError(exc.status, f"{request.method} {request.path}: {exc.reason}")
    return web.json_response(error.body(), status=error.status)


async def json_object(request: web.Request) -> dict[str, Any]:
    """A request's body.

    Raises:
        HttpError: It is not a JSON object.
    """
    try:
        value = json.loads(await request.read())
    except ValueError as exc:
        raise HttpError(400, f"the body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise HttpError(400, "the body is not a JSON object")
    return value


async def send_events(request: web.Request, events: Iterable[str]) -> web.StreamResponse:
    """Answer with server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
    return response
