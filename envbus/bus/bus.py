"""A bus handle: one connection on one bus thread, shared by everything in a process that uses the same address."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import Future

from envbus.bus.address import BusOptions
from envbus.bus.bodies import BodyWorkers
from envbus.bus.connection import Connection
from envbus.bus.thread import BusThread
from envbus.errors import BusClosedError

log = logging.getLogger("envbus.bus")

CLOSE_TIMEOUT_S = 8
"""Longer than the bounds of the steps of Connection.close() together."""

_lock = threading.Lock()
_shared: dict[tuple[int, BusOptions], Bus] = {}


class Bus:
    """A connection to NATS on its own thread.

    Use ``Bus.acquire`` and ``release``: the thread and the connection live as long as anybody uses them.
    """

    def __init__(self, options: BusOptions) -> None:
        self.options = options
        self.thread = BusThread()
        self.workers = BodyWorkers()
        self._users = 0
        self._key = (os.getpid(), options)
        self._opening: Future[None] | None = None
        self.connection: Connection = self.thread.submit(self._make()).result(10)

    async def _make(self) -> Connection:
        return Connection(self.options, name=f"envbus-{os.getpid()}")

    @classmethod
    def acquire(cls, options: BusOptions) -> Bus:
        """Return this process's bus for an address. Pair with release()."""
        key = (os.getpid(), options)
        with _lock:
            bus = _shared.get(key)
            if bus is None:
                bus = _shared[key] = cls(options)
            bus._users += 1
            return bus

    @property
    def is_of_this_process(self) -> bool:
        """Whether its thread runs here: no thread comes along in a fork."""
        return self._key[0] == os.getpid()

    def open(self, *, timeout_s: float | None) -> Future[None]:
        """Connect, once for all users; a failed attempt is made anew by the next.

        Args:
            timeout_s: See Connection.open; the first caller's counts.
        """
        with _lock:
            opening = self._opening
            if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
                opening = self._opening = self.thread.submit(self.connection.open(timeout_s=timeout_s))
            return opening

    async def opened(self, *, timeout_s: float | None) -> None:
        """Await open() from another loop; the cancel of one caller does not reach the others.

        Raises:
            BusClosedError: The bus was released meanwhile.
        """
        opening = self.open(timeout_s=timeout_s)
        try:
            await asyncio.shield(asyncio.wrap_future(opening))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.cancelled() and task is not None and not task.cancelling():
                raise BusClosedError("the connection was closed while it was opened") from None
            raise

    def release(self) -> None:
        """Say that this user is done; the last one closes the connection.

        Blocks for some seconds, and until the bodies that are being packed or unpacked are done: no thread can be
        stopped in the midst of one.
        """
        with _lock:
            self._users -= 1
            if self._users > 0:
                return
            _shared.pop(self._key, None)
        if self._opening is not None:
            self._opening.cancel()
        try:
            self.thread.submit(self.connection.close()).result(CLOSE_TIMEOUT_S)
        except TimeoutError:
            log.warning("NATS at %s: not closed in %d s, dropped", self.options.describe(), CLOSE_TIMEOUT_S)
        finally:
            self.thread.stop()
            self.workers.stop()
