"""Copies the long lists of outputs on the env's loop, some in each of its turns: other tasks run in between.

What a rollout returns is copied in the same turn as a rule. Where many large outputs wait to be packed, the lists of
the next are copied when there is room: copies take memory, and every pass of the garbage collector reads all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from envbus.bus.codec import Frozen

MAX_TURN_ITEMS = 2**19
"""Copied in one turn of the loop: 2 ms, on a busy machine 10."""
MAX_ITEMS = 2**21
"""Of copies that wait to be packed, unless there is only one."""


class CopyTurns:
    """The copying of one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._freed = asyncio.Event()
        self._items = 0
        self._this_turn = 0

    @asynccontextmanager
    async def copied(self, frozen: Frozen) -> AsyncIterator[None]:
        """Within this context the long lists of a frozen value are copies; it is packed there."""
        items = 0 if frozen.is_small else frozen.list_items
        if items:
            await self._reserve(items)
        try:
            await self._copy(frozen)
            yield
        finally:
            self._items -= items
            self._freed.set()

    async def _reserve(self, items: int) -> None:
        async with self._lock:
            while self._items and self._items + items > MAX_ITEMS:
                self._freed.clear()
                await self._freed.wait()
            self._items += items

    async def _copy(self, frozen: Frozen) -> None:
        for items in frozen.copy_lists():
            if self._this_turn == 0:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._this_turn += items
            while self._this_turn >= MAX_TURN_ITEMS:  # noqa: ASYNC110 - the next turn is what is waited for
                await asyncio.sleep(0)

    def _next_turn(self) -> None:
        self._this_turn = 0
