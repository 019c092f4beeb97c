"""Holds an async context in a task of its own: entered and left there, whoever opens and closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from envbus.errors import UsageError


class Serving:
    """A context that is entered once, at first use, and left at the end.

    Args:
        make: Returns the context.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self._entered = asyncio.Event()
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Enter the context, or wait until it is entered; raises what it raises."""
        if self._entered.is_set() and not self._closing.is_set():
            return
        if self._closing.is_set():
            raise UsageError("this environment is closed")
        if self._task is None:
            self._task = asyncio.create_task(self._hold(), name="serving an environment")
        entered = asyncio.create_task(self._entered.wait())
        try:
            await asyncio.wait({entered, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            entered.cancel()
        if self._task.done():
            self._task.result()
            raise UsageError("this environment is closed")

    async def close(self) -> None:
        """Leave the context, or stop entering it; raises what it raises."""
        self._closing.set()
        task, self._task = self._task, None
        if task is None:
            return
        if not self._entered.is_set():
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
        except Exception:
            if self._entered.is_set():  # else open() has raised it
                raise

    async def _hold(self) -> None:
        async with self._make():
            self._entered.set()
            await self._closing.wait()
