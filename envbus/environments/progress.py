"""What a rollout tells while it runs. ``report`` hands it to whoever called, and costs nothing where nobody listens.

The sink is found by a ContextVar that the server's runner, or the run in this process, sets around the call: tasks that
the environment makes inherit it. Reports of one call arrive in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from envbus.bus.codec import Limits, decode_map, encode
from envbus.evaluation.callbacks import call_safely
from envbus.settings import MAX_REPORT_BYTES
from envbus.types import OnProgress, RolloutProgress

REPORT_LIMITS = Limits(max_bytes=MAX_REPORT_BYTES)


class Sink(Protocol):
    """Where the reports of one call go."""

    @property
    def is_open(self) -> bool:
        """Whether somebody still listens."""

    async def report(self, data: Mapping[str, Any]) -> None:
        """Pass a report on; waits while too much is under way."""


sink: ContextVar[Sink | None] = ContextVar("envbus_progress_sink", default=None)
"""Of the call that runs in this context."""
position: ContextVar[int] = ContextVar("envbus_progress_position", default=0)
"""Which input of the call runs in this context: 0, or the place in its group."""


def is_wanted() -> bool:
    """Whether the caller wants progress: where making a report takes work, ask first."""
    current = sink.get()
    return current is not None and current.is_open


async def report(data: Mapping[str, Any]) -> None:
    """Tell the caller how the rollout is going; call it on the environment's event loop.

    Returns at once when nobody asked. Else the caller gets a copy of the data as it is now, before its call returns;
    this waits while the caller is slow.

    Raises:
        EncodeError: The data cannot travel: over 64 MiB, or nested too deep.
    """
    current = sink.get()
    if current is not None and current.is_open:
        await current.report(data)


@contextmanager
def reporting_to(target: Sink) -> Iterator[None]:
    """Within this context reports go to this sink."""
    token = sink.set(target)
    try:
        yield
    finally:
        sink.reset(token)


@contextmanager
def reporting_here(on_progress: OnProgress | None) -> Iterator[None]:
    """Within this context reports go straight to a callback, and none of them after it; None changes nothing."""
    if on_progress is None:
        yield
        return
    target = CallbackSink(on_progress)
    try:
        with reporting_to(target):
            yield
    finally:
        target.is_open = False


class CallbackSink:
    """Calls back at once, in this task."""

    def __init__(self, on_progress: OnProgress) -> None:
        self.is_open = True
        self._on_progress = on_progress
        self._number = 0

    async def report(self, data: Mapping[str, Any]) -> None:
        """Call back with a copy of the data."""
        copy = decode_map(encode(dict(data), limits=REPORT_LIMITS), limits=REPORT_LIMITS)
        self._number += 1
        call_safely(self._on_progress, RolloutProgress(1, self._number, copy))
