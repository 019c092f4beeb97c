"""Large bodies between a client and one server: results pulled, inputs pushed, part by part.

One window bounds the parts under way over all transfers of a client, so that
nothing floods a slow reader; each part has a timeout and retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from envbus.bus.bodies import BodyWorkers
from envbus.bus.connection import Connection
from envbus.bus.failures import from_failure
from envbus.bus.messages import Failure, Fetch, Ok, Part, PartReply, Parts, WireMessage, pack, parse
from envbus.bus.subjects import Subjects
from envbus.bus.transfer import Assembly, Packed, part_of
from envbus.client.undelivered import Undelivered
from envbus.errors import DecodeError, ResultTooLargeError
from envbus.settings import PROBE_TIMEOUT_S, ClientSettings


class Transfers:
    """The transfers of one client. On the bus loop."""

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        *,
        client_id: str,
        settings: ClientSettings,
        workers: BodyWorkers,
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._client_id = client_id
        self._settings = settings
        self._workers = workers
        self._window = asyncio.Semaphore(settings.pull_window)
        self.undelivered = Undelivered(settings.max_undelivered_bytes)

    async def pull(self, job_id: str, server: str, parts: Parts | None) -> Packed:
        """Fetch a result, once there is room; it takes that room until ``undelivered.release()``.

        Args:
            parts: As announced; None: part 0 tells.

        Raises:
            NoServerError: The server is gone.
            ResultTooLargeError: Over this client's ceiling.
            ResultLostError: The server no longer holds it.
            DecodeError: What came is damaged.
            TimeoutError: A part did not come, after all retries.
        """
        first: PartReply | None = None
        if parts is None:
            first = await self._fetch(job_id, server, 0)
            parts = first.parts
        limit = self._settings.max_result_bytes
        if max(parts.size, parts.raw_size) > limit:
            raise ResultTooLargeError(
                f"the result has {max(parts.size, parts.raw_size):,} bytes, this client's ceiling is {limit:,}; "
                "raise ENVBUS_CLIENT_MAX_RESULT_BYTES or return less",
            )
        await self.undelivered.reserve(job_id, max(parts.size, parts.raw_size))
        try:
            return await self._pull_all(job_id, server, parts, first)
        except BaseException:
            self.undelivered.release(job_id)
            raise

    async def _pull_all(self, job_id: str, server: str, parts: Parts, first: PartReply | None) -> Packed:
        assembly = Assembly(parts, max_bytes=self._settings.max_result_bytes)
        if first is not None:
            assembly.put(0, first.data)
        indexes = iter(range(0 if first is None else 1, parts.parts))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._settings.pull_window, parts.parts)):
                group.create_task(self._pull_parts(assembly, job_id, server, indexes))
        return await self._workers.run(assembly.packed)

    async def push(self, job_id: str, server: str, packed: Packed, parts: Parts) -> None:
        """Send an input to the server that accepted its job.

        Raises:
            NoServerError: The server is gone.
            CallError: The server refused a part.
            TimeoutError: A part was not taken, after all retries.
        """
        async with asyncio.TaskGroup() as group:
            for index in range(parts.parts):
                group.create_task(self._push_part(job_id, server, packed, parts, index))

    async def _pull_parts(self, assembly: Assembly, job_id: str, server: str, indexes: Iterator[int]) -> None:
        for index in indexes:
            reply = await self._fetch(job_id, server, index)
            assembly.put(index, reply.data)

    async def _fetch(self, job_id: str, server: str, index: int) -> PartReply:
        reply = await self._ask(server, lambda: Fetch(client=self._client_id, job=job_id, index=index))
        if not isinstance(reply, PartReply) or (reply.job, reply.index) != (job_id, index):
            raise DecodeError(f"asked for a part of a result, got {reply.kind}")
        return reply

    async def _push_part(self, job_id: str, server: str, packed: Packed, parts: Parts, index: int) -> None:
        def part() -> Part:
            return Part(job=job_id, client=self._client_id, index=index, data=part_of(packed.data, parts, index))

        reply = await self._ask(server, part)
        if not isinstance(reply, Ok):
            raise DecodeError(f"sent a part of an input, got {reply.kind}")

    async def _ask(self, server: str, make: Callable[[], WireMessage]) -> WireMessage:
        """Ask within the window; the message is made only then, so that waiting parts take no memory."""
        async with self._window:
            message = pack(make())
            tries = 0
            while True:
                tries += 1
                try:
                    subject = self._subjects.server(server)
                    data = await self._connection.request(subject, message, timeout_s=PROBE_TIMEOUT_S)
                    break
                except TimeoutError:
                    if tries >= self._settings.part_retries and self._connection.is_up:
                        raise
        reply = parse(data)
        if isinstance(reply, Failure):
            raise from_failure(reply)
        return reply
