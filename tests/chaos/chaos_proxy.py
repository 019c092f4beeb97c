"""A TCP link between one process and NATS that can be cut, half-open, slow or narrow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

CHUNK_BYTES = 64 * 1024
MAX_QUEUED = 64
PAUSE_S = 0.05


class Link:
    """Forwards connections from a port of its own.

    Attributes:
        cut: Connections are refused; those that were there have been reset.
        half_open: Connections are accepted, and what is sent on them disappears.
        delay_s: How long each piece is under way.
        bytes_per_s: How much may pass in each direction; 0: as much as can.
        swallowed_bytes: What has disappeared in it so far.
    """

    def __init__(self, target_port: Callable[[], int]) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.cut = False
        self.half_open = False
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.swallowed_bytes = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.reset()

    def reset(self) -> None:
        """Break all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def restore(self) -> None:
        """End whatever is wrong; streams that lost bytes are broken for good."""
        if self.half_open:
            self.reset()
        self.cut = self.half_open = False
        self.delay_s = self.bytes_per_s = 0.0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if not self.cut:
                await self._forward(reader, writer)
        except OSError:
            pass  # NATS is down, or one side was reset
        except asyncio.CancelledError:
            pass  # the end of the run; asyncio's own callback on this task would report it
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self.half_open:  # noqa: ASYNC110 - whoever ends it sets a plain attribute
            await asyncio.sleep(PAUSE_S)
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target_port(), limit=CHUNK_BYTES)
        self._writers.add(to_writer)
        try:
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, to_writer), (to_reader, writer))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            to_writer.transport.abort()
            self._writers.discard(to_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_QUEUED)
        sending = asyncio.create_task(self._send(queue, writer))
        try:
            while not sending.done() and (data := await reader.read(CHUNK_BYTES)):
                if self.half_open:
                    self.swallowed_bytes += len(data)
                else:
                    await queue.put((asyncio.get_running_loop().time() + self.delay_s, data))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await queue.get()
            if (wait_s := due - clock()) > 0:
                await asyncio.sleep(wait_s)
            if rate := self.bytes_per_s:
                await asyncio.sleep(len(data) / rate)
            writer.write(data)
            await writer.drain()
