"""As much of HTTP/1.1 as an OpenAI client needs: requests with a length, keep-alive, chunked answers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

MAX_BODY_BYTES = 64 * 1024 * 1024
WRITE_TIMEOUT_S = 30.0
LAST_CHUNK = b"0\r\n\r\n"


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


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, read to its end."""

    method: str
    path: str
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            HttpError: It is not one.
        """
        try:
            value = json.loads(self.body)
        except ValueError as exc:
            raise HttpError(400, f"the body is not JSON: {exc}") from exc
        if not isinstance(value, dict):
            raise HttpError(400, "the body is not a JSON object")
        return value


async def read_request(reader: asyncio.StreamReader) -> HttpRequest | None:
    """Read the next request of a connection; None when the client has closed it.

    Raises:
        HttpError: What came is not a request that this server reads.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _version = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "transfer-encoding" in headers:
            raise HttpError(411, "send the body with a content-length")
        length = int(headers.get("content-length", 0))
        if not 0 <= length <= MAX_BODY_BYTES:
            raise HttpError(413, f"the body is over {MAX_BODY_BYTES} bytes")
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except asyncio.LimitOverrunError as exc:
        raise HttpError(431, "the request's headers are too large") from exc
    except ValueError as exc:
        raise HttpError(400, "this is not an HTTP/1.1 request") from exc
    return HttpRequest(method, target.partition("?")[0], headers, body)


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write bytes, waiting a bounded time for a slow reader."""
    writer.write(data)
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        await writer.drain()


def json_response(value: Any, *, status: int = 200) -> bytes:
    """A whole response with a JSON body."""
    return response(json.dumps(value).encode(), status=status)


def response(body: bytes, *, status: int = 200) -> bytes:
    """A whole response."""
    return _head(status, "application/json", f"content-length: {len(body)}") + body


def stream_head() -> bytes:
    """The start of a response that is sent as chunks of server-sent events."""
    return _head(200, "text/event-stream", "transfer-encoding: chunked")


def event_chunk(data: str) -> bytes:
    """One server-sent event as one chunk."""
    event = f"data: {data}\n\n".encode()
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


def _head(status: int, content_type: str, length_header: str) -> bytes:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Status"
    return f"HTTP/1.1 {status} {reason}\r\ncontent-type: {content_type}\r\n{length_header}\r\n\r\n".encode()
