"""One address for the clients of one env: tells their messages apart, and keeps its clients.

A message of 2 frames is of verifiers 0.1, one of 3 is of 0.4. Imports pyzmq: import it only where that is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import zmq

from envbus.adapters.gateway import classic, taskset
from envbus.adapters.gateway.caller import Caller
from envbus.adapters.gateway.fleet_health import FleetHealth
from envbus.adapters.gateway.limits import GatewayLimits
from envbus.adapters.gateway.outbox import Outbox
from envbus.adapters.gateway.requests import Cancel, Dialect, Frames, Health, Run
from envbus.adapters.gateway.router_socket import RouterSocket
from envbus.client import NATSEnvClient
from envbus.errors import BadRequestError, EnvbusError

log = logging.getLogger("envbus.gateway")

_DIALECTS: dict[int, Dialect] = {classic.NUM_FRAMES: classic.Classic(), taskset.NUM_FRAMES: taskset.Taskset()}
_MAX_WARNINGS = 100


class Listener:
    """Answers at one address while it is open.

    Args:
        make_client: Makes a client of the env.
        limits: Sizes and times.
    """

    def __init__(self, make_client: Callable[[], NATSEnvClient], limits: GatewayLimits) -> None:
        self._make_client = make_client
        self._limits = limits
        self._watcher = make_client()
        self._health = FleetHealth(self._watcher)
        self._callers: dict[bytes, Caller] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._warnings = 0

    @property
    def address(self) -> str:
        """Where it listens; with the port that was taken."""
        return self._socket.address

    @property
    def trouble(self) -> str | None:
        """Why the fleet takes no rollouts; None while it does."""
        return self._health.trouble

    async def open(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """Connect to NATS, then listen.

        Raises:
            BusError: NATS is not there.
            UsageError: The address cannot be bound.
        """
        try:
            await self._watcher.connect()
            await self._health.ask()
            self._socket = RouterSocket(context, address, self._on_message, self._limits)
        except BaseException:
            await self._watcher.close()
            raise
        self._loops = [asyncio.create_task(self._health.watch()), asyncio.create_task(self._sweep_forever())]

    async def close(self) -> None:
        """Cancel what runs, answer what must be answered, and let go of the address."""
        self._socket.stop_reading()
        for task in self._loops:
            task.cancel()
        for identity in list(self._callers):
            self._let_go(identity)
        await asyncio.gather(*self._loops, *self._leaving, return_exceptions=True)
        self._socket.close()
        await self._watcher.close()

    def _on_message(self, identity: bytes, frames: Frames) -> None:
        dialect = _DIALECTS.get(len(frames))
        if dialect is None:
            self._warn(f"a message of {len(frames)} frames was dropped: is the client one of verifiers 0.1 or 0.4?")
            return
        try:
            self._serve(identity, dialect, frames)
        except EnvbusError as error:
            self._warn(f"a request was refused: {error}")
            self._answer(identity, dialect.failed(frames[0], error))
        except Exception as error:  # noqa: BLE001 - whatever is in a message, its sender does not wait for ever
            self._warn(f"a request could not be read: {error!r}")
            self._answer(identity, dialect.failed(frames[0], error))

    def _serve(self, identity: bytes, dialect: Dialect, frames: Frames) -> None:
        size_bytes = sum(map(len, frames))
        if size_bytes > self._limits.max_request_bytes:
            raise BadRequestError(f"{size_bytes:,} bytes, over the limit of {self._limits.max_request_bytes:,} bytes")
        match dialect.read(frames):
            case Health(request_id):
                self._answer(identity, dialect.health(request_id, self._health.trouble))
            case Cancel(request_id, target):
                caller = self._callers.get(identity)
                was_running = caller is not None and caller.cancel(target)
                self._answer(identity, dialect.cancel(request_id, was_running))
            case Run() as run:
                self._check_room(size_bytes)
                self._caller(identity).start(dialect, run, size_bytes)

    def _check_room(self, size_bytes: int) -> None:
        held_bytes = sum(caller.held_bytes for caller in self._callers.values())
        if held_bytes + size_bytes > self._limits.max_held_bytes:
            raise BadRequestError(f"the gateway holds {held_bytes:,} bytes of unanswered requests: wait for answers")

    def _caller(self, identity: bytes) -> Caller:
        caller = self._callers.get(identity)
        if caller is None:
            if len(self._callers) >= self._limits.max_clients:
                raise BadRequestError(f"the gateway has {len(self._callers):,} clients: start another one")
            outbox = Outbox(
                partial(self._socket.send, identity),
                partial(self._on_gone, identity),
                max_bytes=self._limits.max_unread_bytes,
            )
            caller = Caller(self._make_client(), outbox, max_requests=self._limits.max_requests)
            self._callers[identity] = caller
        return caller

    def _answer(self, identity: bytes, frames: Frames | None) -> None:
        caller = self._callers.get(identity)
        if caller is not None:
            caller.send(frames)
        elif frames is not None:
            self._socket.send(identity, frames)  # one without requests who does not read loses answers, nothing else

    def _on_gone(self, identity: bytes, why: str) -> None:
        log.warning("a client %s: its requests are cancelled", why)
        self._let_go(identity)

    def _let_go(self, identity: bytes) -> None:
        caller = self._callers.pop(identity, None)
        if caller is not None:
            task = asyncio.create_task(caller.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.probe_interval_s)
            for identity, caller in list(self._callers.items()):
                caller.probe()
                if caller.idle_s > self._limits.idle_s:
                    self._let_go(identity)

    def _warn(self, text: str) -> None:
        self._warnings += 1
        if self._warnings <= _MAX_WARNINGS:
            log.warning("%s", text)
