"""One connected client that asks for rollouts: a client of its own on the bus, so that the fleet shares out by clients.

Owns the tasks of its requests: each ends with one answer, or with none once the client is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from envbus.adapters.gateway.outbox import Outbox
from envbus.adapters.gateway.requests import Dialect, Frames, Run
from envbus.client import NATSEnvClient
from envbus.errors import BadRequestError, EnvbusError

log = logging.getLogger("envbus.gateway")


@dataclass(frozen=True, slots=True)
class _Request:
    dialect: Dialect
    task: asyncio.Task[Frames]
    size_bytes: int


class Caller:
    """One client.

    Args:
        client: Its own; closed with it.
        outbox: Where answers go.
        max_requests: How many may be unanswered.
    """

    def __init__(self, client: NATSEnvClient, outbox: Outbox, *, max_requests: int) -> None:
        self._client = client
        self._outbox = outbox
        self._max_requests = max_requests
        self._requests: dict[bytes, _Request] = {}
        self._leaving = False
        self._idle_since = time.monotonic()
        self.held_bytes = 0

    @property
    def idle_s(self) -> float:
        """How long it has had no requests, and nothing to read."""
        return 0.0 if self._requests or not self._outbox.is_empty else time.monotonic() - self._idle_since

    def start(self, dialect: Dialect, run: Run, size_bytes: int) -> None:
        """Run a request; one whose id is that of a request under way is the same one, sent twice.

        Raises:
            BadRequestError: It has too many.
        """
        if run.request_id in self._requests:
            log.warning("a client sent request %r again while it runs: it is answered once", run.request_id[:64])
            return
        if len(self._requests) >= self._max_requests:
            raise BadRequestError(f"this client has {len(self._requests):,} unanswered requests: wait for some")
        task = asyncio.create_task(self._answer(dialect, run))
        self._requests[run.request_id] = _Request(dialect, task, size_bytes)
        self.held_bytes += size_bytes
        task.add_done_callback(partial(self._ended, run.request_id))

    def cancel(self, request_id: bytes) -> bool:
        """End a request; whether there was one."""
        request = self._requests.get(request_id)
        return request is not None and request.task.cancel()

    def send(self, frames: Frames | None) -> None:
        """Answer what needs no rollout."""
        if frames is not None:
            self._outbox.put(frames)

    def probe(self) -> None:
        """See whether it is there, if it has requests."""
        for request in self._requests.values():
            self._outbox.probe(request.dialect.probe())
            return

    async def close(self) -> None:
        """Cancel its jobs, answer what must be answered, and leave the bus."""
        self._leaving = True
        tasks = [request.task for request in self._requests.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._outbox.close()
        try:
            await self._client.close()
        except EnvbusError as error:
            log.warning("a client could not leave the bus in order: %s", error)

    async def _answer(self, dialect: Dialect, run: Run) -> Frames:
        try:
            return dialect.done(run, await self._outputs(dialect, run))
        except Exception as error:
            log.debug("request %r failed", run.request_id[:64], exc_info=True)
            return dialect.failed(run.request_id, error)

    async def _outputs(self, dialect: Dialect, run: Run) -> list[Any]:
        settings = (run.client, run.model, run.sampling_args, run.max_retries, run.state_columns)
        if run.kind == "group":
            return list(await self._client.run_group(run.inputs, *settings))
        on_progress = self._relay(dialect.progress(run.request_id)) if run.streams else None
        return [await self._client.run_rollout(run.inputs[0], *settings, on_progress=on_progress)]

    def _relay(self, messages: Callable[[Any], list[Frames]]) -> Callable[[Any], None]:
        def relay(progress: Any) -> None:
            for frames in messages(progress):
                self._outbox.put(frames)

        return relay

    def _ended(self, request_id: bytes, task: asyncio.Task[Frames]) -> None:
        request = self._requests.pop(request_id)
        self.held_bytes -= request.size_bytes
        self._idle_since = time.monotonic()
        if not task.cancelled():
            self.send(task.result())
        elif self._leaving:
            self.send(request.dialect.stopped(request_id))
        else:
            self.send(request.dialect.cancelled(request_id))
