"""Packs and unpacks large bodies on threads of their own, so that no event loop stands still for them.

Small ones are packed where they are asked for: a change of threads would take longer. A cancel of who waits
leaves the work to end by itself; stop() waits for what is being worked on and ends the rest.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from envbus.bus.codec import DEFAULT_LIMITS, Frozen, Limits, decode_map, encode_frozen
from envbus.bus.transfer import Packed, pack_body
from envbus.errors import BusClosedError

T = TypeVar("T")
SMALL_BYTES = 2**17
"""A body up to this size is unpacked in place."""
THREADS = 2
"""One packs or unpacks while the other compresses or decompresses, which is done without the interpreter."""


class BodyWorkers:
    """The threads of one connection. Usable from any event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="envbus-bodies")
        self._turn = threading.Lock()
        """Two threads that both want the interpreter would only take it from the loops twice as long."""

    async def pack(self, frozen: Frozen, *, limits: Limits = DEFAULT_LIMITS) -> Packed:
        """Return a value as a body, compressed if that pays. The value is used up.

        Raises:
            EncodeError: As encode.
            BusClosedError: The connection was closed meanwhile.
        """
        return await self.packing(lambda: encode_frozen(frozen, limits=limits), frozen)

    async def packing(self, encode: Callable[[], bytes], frozen: Frozen, *, compress: bool = True) -> Packed:
        """Return what ``encode`` makes of a frozen value as a body.

        Raises:
            BusClosedError: The connection was closed meanwhile.
        """
        if frozen.is_small:
            return pack_body(encode(), compress=compress)
        return await self.run(self._pack, encode, frozen, compress)

    async def unpack(self, body: Callable[[], bytes], size_bytes: int, *, limits: Limits) -> dict[str, Any]:
        """Return the map in a body.

        Args:
            body: Returns it, decompressed.
            size_bytes: What it says that it takes then.

        Raises:
            DecodeError: As decode_map.
            BusClosedError: The connection was closed meanwhile.
        """
        if size_bytes <= SMALL_BYTES:
            return decode_map(body(), limits=limits)
        return await self.run(self._unpack, body, limits)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns on one of the threads.

        Raises:
            BusClosedError: The connection was closed meanwhile.
        """
        try:
            future: Future[T] = self._pool.submit(function, *args)
        except RuntimeError:
            raise BusClosedError("the connection is closed") from None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                raise BusClosedError("the connection was closed meanwhile") from None
            raise

    def stop(self) -> None:
        """End the threads, once they are through with what they work on; what waits ends with BusClosedError."""
        self._pool.shutdown(cancel_futures=True)

    def _pack(self, encode: Callable[[], bytes], frozen: Frozen, compress: bool) -> Packed:
        with self._turn:
            body = encode()
            frozen.clear()
        return pack_body(body, compress=compress)

    def _unpack(self, body: Callable[[], bytes], limits: Limits) -> dict[str, Any]:
        data = body()
        with self._turn:
            return decode_map(data, limits=limits)
