"""How a server is asked to stop, by signals, operators, its program or its parent's death; and how it leaves.

A stop has three stages: take no more jobs, let the grace for running ones
begin, cut that grace short. A second signal goes to the third stage; no
signal cuts the teardown that follows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from envbus.bus.lifeline import kill_group
from envbus.bus.thread import Crossing
from envbus.errors import EnvironmentLoadError

log = logging.getLogger("envbus.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_TIMEOUT_S = 5.0
"""How long a server process waits, after its stop, for tasks and threads that the environment left."""
LOADING_ORPHAN_S = 2.0
"""How long a server that still loads may take to end when its parent is gone."""


class LoadInterruptedError(BaseException):
    """SIGTERM or SIGINT while the environment was loading; no Exception, so that loading code cannot swallow it."""


class Stops:
    """The stages of one server's stop, and the signals that bring them about.

    Args:
        handle_signals: Whether to take SIGTERM and SIGINT; only in the main thread.

    Attributes:
        asked: Take no more jobs.
        grace_begun: Running jobs have the grace from now on; without it, as in an operator's drain, they have all time.
        at_once: The grace is over.
        orphaned: The parent is gone, so nobody is left to collect results.
    """

    def __init__(self, *, handle_signals: bool) -> None:
        self.asked = asyncio.Event()
        self.grace_begun = asyncio.Event()
        self.at_once = asyncio.Event()
        self.orphaned = False
        self._handle_signals = handle_signals

    def drain(self) -> None:
        """Take no more jobs; running ones have all time."""
        self.asked.set()

    def stop(self) -> None:
        """Take no more jobs; running ones have the grace."""
        self.grace_begun.set()
        self.asked.set()

    def stop_at_once(self) -> None:
        """Take no more jobs; running ones are cancelled."""
        self.at_once.set()
        self.stop()

    def parent_gone(self, crossing: Crossing, *, is_loading: bool) -> None:
        """The parent has died; called on the lifeline's thread."""
        self.orphaned = True
        if is_loading:
            # The loop does not run; there is nothing to tear down, nor a reason to wait for it.
            leave_soon(LOADING_ORPHAN_S, leave_at_once)
            os.kill(os.getpid(), signal.SIGTERM)
        crossing.post(self.stop_at_once)

    @contextmanager
    def while_loading(self) -> Iterator[None]:
        """Signals raise LoadInterruptedError in the code that loads, as the loop does not run meanwhile."""
        if not self._owns_signals:
            yield
            return

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise LoadInterruptedError(signal.Signals(number).name)

        before = {number: signal.signal(number, interrupt) for number in SIGNALS}
        try:
            yield
        except (EnvironmentLoadError, KeyboardInterrupt) as error:
            if (number := _signal_behind(error)) is None:
                raise
            raise LoadInterruptedError(number.name) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def keeping_signals(self) -> Iterator[None]:
        """Around all of a run: the program that goes on after it has its own handlers again."""
        if not self._owns_signals:
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def while_serving(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Signals go through the stages; then ignored up to the end of the run, so that the teardown is not cut."""
        if not self._owns_signals:
            yield
            return
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    @property
    def _owns_signals(self) -> bool:
        return self._handle_signals and threading.current_thread() is threading.main_thread()

    def _on_signal(self) -> None:
        if self.grace_begun.is_set():
            log.warning("second signal: running rollouts are cancelled now")
            self.stop_at_once()
        self.stop()


def _signal_behind(error: BaseException) -> signal.Signals | None:
    """The signal that ended a load through a handler which a library installed meanwhile, if one did."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    exited = isinstance(error.__cause__, SystemExit) and error.__cause__.code == 128 + signal.SIGTERM
    return signal.SIGTERM if exited else None


def leave_soon(after_s: float, leave: Callable[[], None]) -> threading.Timer:
    """End this process after a while, whatever still runs in it; cancel the timer if it is not needed."""
    timer = threading.Timer(after_s, leave)
    timer.daemon = True
    timer.start()
    return timer


def leave_at_once() -> None:
    """End this process and all that it started."""
    kill_group(os.getpid())
    os._exit(1)


def leave_without_leftovers() -> None:
    """End this process though tasks or threads of the environment still run."""
    log.error("the environment left tasks or threads that do not end; leaving without them")
    os._exit(0)
