"""TCP servers of tests: whatever a handler does, all connections are closed when its server ends; and free ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
TURNS = 5
"""Of the event loop, in which a connection that was just taken gets its handler."""


def free_port() -> int:
    """For a program that cannot choose one by itself and say which."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def tcp_server(handle: Handler, *, port: int = 0) -> AsyncIterator[int]:
    """Listen on loopback; yields the port. What a handler raises when its peer goes away is nobody's concern."""
    handlers: set[asyncio.Task[None]] = set()

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await handle(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            handlers.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(handled, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for _ in range(TURNS):
            for task in list(handlers):
                task.cancel()
            await asyncio.gather(*handlers)
            await asyncio.sleep(0)
        await server.wait_closed()
