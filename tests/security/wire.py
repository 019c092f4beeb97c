"""A NATS connection by hand, for attackers: says to nats-server whatever it is told to, and keeps what comes back."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import nkeys

TIMEOUT_S = 20.0
BUFFER_BYTES = 2**20


class RefusedError(Exception):
    """nats-server ended the connection, or let none be."""


@dataclass(frozen=True)
class Heard:
    """One message that came."""

    subject: str
    data: bytes
    reply: str = ""
    headers: bytes = b""


class Wire:
    """One connection of one user.

    Attributes:
        info: nats-server's greeting.
        heard: Messages that came, in their order.
        errors: What nats-server complained about.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, info: dict[str, Any]) -> None:
        self.info = info
        self.heard: list[Heard] = []
        self.errors: list[str] = []
        self._reader = reader
        self._writer = writer
        self._subscriptions = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, port: int, *, seed: str | None = None, **options: Any) -> AsyncIterator[Wire]:
        """Connect as the user with this nkey seed.

        Args:
            **options: Further fields of CONNECT, as ``user`` and ``password``.

        Raises:
            RefusedError: nats-server does not let this user in.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=BUFFER_BYTES)
        try:
            greeting = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
            if not greeting.startswith(b"INFO "):
                raise RefusedError(greeting.decode() or "closed at once")
            wire = cls(reader, writer, json.loads(greeting[5:]))
            wire.write(b"CONNECT " + json.dumps(wire._introduction(seed) | options).encode() + b"\r\n")
            await wire.settle()
            yield wire
        finally:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _introduction(self, seed: str | None) -> dict[str, Any]:
        about: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        if seed is not None:
            pair = nkeys.from_seed(seed.encode())
            signature = pair.sign(self.info["nonce"].encode())
            about |= {"nkey": pair.public_key.decode(), "sig": base64.urlsafe_b64encode(signature).decode().rstrip("=")}
        return about

    def write(self, data: bytes) -> None:
        """Say anything, at once."""
        self._writer.write(data)

    async def push(self, data: bytes) -> None:
        """Say anything, as fast as nats-server takes it."""
        self.write(data)
        try:
            await asyncio.wait_for(self._writer.drain(), TIMEOUT_S)
        except OSError as error:
            raise RefusedError(str(error)) from error

    def publish(self, subject: str, data: bytes = b"", *, reply: str = "", headers: str = "") -> None:
        """Say PUB or HPUB."""
        words = " ".join(filter(None, (subject, reply)))
        if headers:
            head = f"NATS/1.0\r\n{headers}\r\n\r\n".encode()
            self.write(f"HPUB {words} {len(head)} {len(head) + len(data)}\r\n".encode() + head + data + b"\r\n")
        else:
            self.write(f"PUB {words} {len(data)}\r\n".encode() + data + b"\r\n")

    def subscribe(self, subject: str, *, queue: str = "") -> None:
        """Say SUB."""
        self._subscriptions += 1
        self.write(f"SUB {' '.join(filter(None, (subject, queue)))} {self._subscriptions}\r\n".encode())

    async def settle(self) -> list[Heard]:
        """Wait until nats-server has judged all that was said; returns all that came so far.

        What nats-server had for this connection by then came before.

        Raises:
            RefusedError: It has ended the connection instead.
        """
        await self.push(b"PING\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            while await self._read_one() != "PONG":
                pass
        return self.heard

    async def hears(self, count: int = 1) -> list[Heard]:
        """Wait until so many messages have come in all."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.heard) < count:
                await self._read_one()
        return self.heard

    async def ask(self, subject: str, data: bytes = b"", *, inbox: str) -> Heard:
        """Send a request and wait for the first message that comes from now on."""
        count = len(self.heard)
        self.publish(subject, data, reply=inbox)
        return (await self.hears(count + 1))[count]

    async def ended(self) -> bool:
        """Whether nats-server ends this connection."""
        with contextlib.suppress(RefusedError):
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    await self._read_one()
        return True

    async def _read_one(self) -> str:
        try:
            line = (await self._reader.readuntil(b"\r\n")).decode().strip()
            word, _, rest = line.partition(" ")
            if word in ("MSG", "HMSG"):
                await self._read_message(rest.split(), has_headers=word == "HMSG")
        except (OSError, asyncio.IncompleteReadError) as error:
            raise RefusedError("; ".join(self.errors) or str(error)) from error
        if word == "PING":
            self.write(b"PONG\r\n")
        elif word == "-ERR":
            self.errors.append(rest.strip("'"))
        return word

    async def _read_message(self, words: list[str], *, has_headers: bool) -> None:
        sizes = [int(word) for word in words[-2 if has_headers else -1 :]]
        body = await self._reader.readexactly(sizes[-1] + 2)
        head = sizes[0] if has_headers else 0
        middle = words[2 : -2 if has_headers else -1]
        self.heard.append(Heard(words[0], body[head:-2], middle[0] if middle else "", body[:head]))
