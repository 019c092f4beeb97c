"""Messages from code that cannot wait, sent in order by a task of their own."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from envbus.errors import BusError

log = logging.getLogger("envbus.bus")


class Outbox:
    """The messages of one connection that are to be sent soon.

    Args:
        publish: Sends ``(subject, data, reply)``; a message that it cannot send is dropped.
    """

    def __init__(self, publish: Callable[[str, bytes, str], Awaitable[object]]) -> None:
        self._publish = publish
        self._messages: deque[tuple[str, bytes, str]] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self.queued_bytes = 0

    def put(self, subject: str, data: bytes, reply: str) -> None:
        """Send a message soon. Never blocks."""
        self._messages.append((subject, data, reply))
        self.queued_bytes += len(data)
        self._empty.clear()
        self._filled.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._messages:
                subject, data, reply = self._messages.popleft()
                self.queued_bytes -= len(data)
                try:
                    await self._publish(subject, data, reply)
                except BusError as error:
                    log.error("a message to %s was not sent: %s", subject, error)
                except Exception:
                    log.exception("a message to %s was not sent", subject)
            self._empty.set()

    async def emptied(self, *, timeout_s: float) -> None:
        """Wait until nothing is left to send, or for so long."""
        if self._messages:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
            except TimeoutError:
                log.warning("%d messages were not sent before the connection closed", len(self._messages))
