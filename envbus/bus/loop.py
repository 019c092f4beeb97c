"""The event loop of the bus thread: uvloop where there is one, and it can end whatever was left open on it.

nats-py leaves a socket open when its close() is cut short, and uvloop does not close while one is.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.platform == "win32":
    from asyncio import SelectorEventLoop as _Loop
else:
    from uvloop import Loop as _Loop


class BusLoop(_Loop):
    """An event loop that knows its connections."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: set[asyncio.WriteTransport] = set()  # weak references to uvloop's TLS there are none

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        """Connect, as any event loop does."""
        transport, protocol = await super().create_connection(*args, **kwargs)
        self._connections = {other for other in self._connections if not other.is_closing()} | {transport}
        return transport, protocol

    async def abort_connections(self) -> None:
        """Drop what is still connected, unsent data included."""
        for transport in self._connections:
            transport.abort()
        self._connections.clear()
        await asyncio.sleep(0)
