"""Runs a command's coroutine: its interrupts, its errors, and an end that nothing can hold up.

The first Ctrl-C (or SIGTERM) cancels it in order, the second ends the process. Once the
work is done, threads and pools that an environment left behind get a short time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import psutil

from envbus.cli.reporting import EXIT_INTERRUPTED, report

LEAVE_S = 2.0
"""How long the interpreter may take to end when the work is done."""

on_force: list[Callable[[], object]] = []
"""Called, newest first, when a second Ctrl-C ends the process at once."""


def run(work: Callable[[], Coroutine[Any, Any, int]], *, verbose: bool, interrupted: int = EXIT_INTERRUPTED) -> int:
    """Run a command.

    Args:
        work: Makes the coroutine; its result is the exit code.
        verbose: Show tracebacks of errors.
        interrupted: Exit code after a cancel by signal.
    """

    async def main() -> int:
        code = EXIT_INTERRUPTED
        try:
            with _cancelled_by_signals():
                code = await work()
        except asyncio.CancelledError:
            code = interrupted
        except Exception as error:  # noqa: BLE001 - the top of the process
            code = report(error, verbose=verbose)
        finally:
            _leave_within(LEAVE_S, code)
        return code

    return asyncio.run(main())


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    # Handlers of the signal module, not of the loop: they run even while code of an environment blocks it.
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    count = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            _force()
        loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def keeping_signals() -> Iterator[None]:
    """Undo what code that runs in here, an environment's, does to the handlers of SIGINT and SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _force() -> None:
    for act in reversed(on_force):
        with contextlib.suppress(Exception):
            act()
    os._exit(EXIT_INTERRUPTED)


def _leave_within(limit_s: float, code: int) -> None:
    timer = threading.Timer(limit_s, _leave, [code])
    timer.daemon = True
    timer.start()


def _leave(code: int) -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(code)
