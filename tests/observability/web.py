"""As much of an HTTP client as the tests need, without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str


async def raw(port: int, data: bytes) -> bytes:
    """Send bytes; everything that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def get(port: int, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
    named = {"Host": "localhost", **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    head, _, body = (await raw(port, ("\r\n".join(lines) + "\r\n\r\n").encode())).partition(b"\r\n\r\n")
    first, *fields = head.decode().split("\r\n")
    told = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    return Answer(int(first.split(" ")[1]), told, body.decode())
