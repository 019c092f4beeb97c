"""The bus thread, and the one place where work crosses between threads.

A BusThread runs an event loop of its own (uvloop where there is one), so that
neither blocking user code nor a busy caller's loop silences the connection.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from envbus.bus.loop import BusLoop
from envbus.errors import BusClosedError

T = TypeVar("T")


class Crossing:
    """Runs callables on an event loop of another thread; many posts share one wake-up.

    Posts run in order. A post to a loop that is closed is dropped: nobody there can be waiting for it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._awake = False

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function(*args)`` soon on the loop's thread. Never blocks."""
        self._posts.append((function, args))
        if not self._awake:
            # Appended before this test, and reset before the queue is read: a post is never left behind.
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                self._posts.clear()
                self._awake = False

    def _run(self) -> None:
        self._awake = False
        while self._posts:
            function, args = self._posts.popleft()
            try:
                function(*args)
            except Exception as error:  # noqa: BLE001 - one failed post must not take the others with it
                self._loop.call_exception_handler({"message": f"posted {function!r} failed", "exception": error})


class BusThread:
    """A daemon thread with an event loop, started at once."""

    def __init__(self, name: str = "envbus") -> None:
        self._loop = BusLoop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self.crossing = Crossing(self._loop)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.abort_connections())
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the bus loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs on the bus loop, from another loop; a cancel reaches it.

        Raises:
            BusClosedError: The thread was stopped meanwhile.
        """
        future = self.submit(coroutine)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise BusClosedError("the connection was closed meanwhile") from None
            raise

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Cancel what still runs and end the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
