"""What goes to one client: at once while it reads, else kept in order up to a bound.

Does not touch sockets: it is given the send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from envbus.adapters.gateway.requests import Frames
from envbus.adapters.gateway.router_socket import Sent

RETRY_S = 0.002
"""ZeroMQ does not tell when one client's queue has room again."""


class Outbox:
    """Messages to one client, in order.

    Args:
        send: Sends one message, or says that it cannot.
        on_gone: Called once, when the client is gone or has left too much unread.
        max_bytes: How much that may be.
    """

    def __init__(self, send: Callable[[Frames], Sent], on_gone: Callable[[str], None], *, max_bytes: int) -> None:
        self._send = send
        self._on_gone = on_gone
        self._max_bytes = max_bytes
        self._kept: deque[Frames] = deque()
        self._kept_bytes = 0
        self._retry: asyncio.Handle | None = None
        self._is_gone = False

    @property
    def is_empty(self) -> bool:
        """Whether all has been sent."""
        return not self._kept

    def put(self, frames: Frames) -> None:
        """Send a message after those before it."""
        if self._is_gone:
            return
        self._kept.append(frames)
        self._kept_bytes += _size(frames)
        if self._retry is None:
            self._flush()
        if self._kept_bytes > self._max_bytes:
            self._give_up(f"has left {self._kept_bytes:,} bytes unread")

    def probe(self, frames: Frames) -> None:
        """See whether the client is there, if nothing waits for it anyway."""
        if self.is_empty:
            self.put(frames)

    def close(self) -> None:
        """Drop what is kept, and all that is put later."""
        self._is_gone = True
        self._kept.clear()
        self._kept_bytes = 0
        if self._retry is not None:
            self._retry.cancel()

    def _flush(self) -> None:
        self._retry = None
        while self._kept:
            match self._send(self._kept[0]):
                case Sent.SENT:
                    self._kept_bytes -= _size(self._kept.popleft())
                case Sent.FULL:
                    self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._flush)
                    return
                case Sent.GONE:
                    self._give_up("is not connected any more")
                    return

    def _give_up(self, why: str) -> None:
        self.close()
        self._on_gone(why)


def _size(frames: Frames) -> int:
    return sum(map(len, frames))
