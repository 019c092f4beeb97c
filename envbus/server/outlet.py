"""The env's end of a job's progress: packs reports in their order, and holds them back while the caller is slow.

Lives on the env's loop. A report is handed over as a whole or not at all, so a cancel in between breaks nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from envbus.bus.bodies import BodyWorkers
from envbus.bus.codec import encode_frozen, freeze
from envbus.environments.progress import REPORT_LIMITS
from envbus.server.progress import cost_bytes


class Outlet:
    """The sink of one job's reports.

    Args:
        attempt: The one that the job was taken with.
        window_bytes: On their way to the caller, at most; a larger report goes alone.
        send: Called with each report's body.
    """

    def __init__(self, *, attempt: int, window_bytes: int, workers: BodyWorkers, send: Callable[[bytes], None]) -> None:
        self.attempt = attempt
        self.is_open = True
        self._window_bytes = window_bytes
        self._workers = workers
        self._send = send
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._under_way_bytes = 0

    async def report(self, data: Mapping[str, Any]) -> None:
        """Sink: pass a report on, once there is room for it.

        Raises:
            EncodeError: It cannot travel.
        """
        frozen = freeze(dict(data), limits=REPORT_LIMITS)
        async with self._turn:
            packed = await self._workers.packing(
                lambda: encode_frozen(frozen, limits=REPORT_LIMITS), frozen, compress=False
            )
            await self._room(cost_bytes(packed.data))
            if self.is_open:
                self._under_way_bytes += cost_bytes(packed.data)
                self._send(packed.data)

    async def _room(self, size_bytes: int) -> None:
        while self.is_open and self._under_way_bytes and self._under_way_bytes + size_bytes > self._window_bytes:
            self._changed.clear()
            await self._changed.wait()

    def heard(self, freed_bytes: int) -> None:
        """The caller has taken so much."""
        self._under_way_bytes = max(0, self._under_way_bytes - freed_bytes)
        self._changed.set()

    def close(self) -> None:
        """The call is over: what is reported from now on goes nowhere."""
        self.is_open = False
        self._changed.set()
