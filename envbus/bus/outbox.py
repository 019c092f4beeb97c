"""Messages from code that cannot wait, sent in order by a task of their own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from envbus.errors import BusError
from envbus.notices import Notices

log = logging.getLogger("envbus.bus")


class Outbox:
    """The messages of one connection that are to be sent soon.

    Args:
        publish: Sends ``(subject, data, reply)``; a message that it cannot send is dropped.
        notices: Where that is logged.
    """

    def __init__(self, publish: Callable[[str, bytes, str], Awaitable[object]], notices: Notices) -> None:
        self._publish = publish
        self._notices = notices
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
                    self._note(f"a message to {subject} was not sent: {error}")
                except Exception as error:  # noqa: BLE001 - logged, and the others are sent
                    self._note(f"a message to {subject} was not sent", error)
            self._empty.set()

    def _note(self, text: str, error: Exception | None = None) -> None:
        self._notices.note("not sent", text, time.monotonic(), level=logging.ERROR, error=error)

    async def emptied(self, *, timeout_s: float) -> None:
        """Wait until nothing is left to send, or for so long."""
        if self._messages:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
            except TimeoutError:
                log.warning("%d messages were not sent before the connection closed", len(self._messages))
