"""A TCP server of a test: whatever its handler does, all its connections are closed when the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
TURNS = 5
"""Of the event loop, in which a connection that was just taken gets its handler."""


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
