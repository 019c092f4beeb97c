"""An episode's deltas as progress: in order, and no faster than the caller takes them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from verifiers.v1.serve.delta import DeltaStreamer, pack, unpack

from envbus.environments import progress


@asynccontextmanager
async def streamed(
    traces: Callable[[], Iterable[Any]], about: Callable[[], dict[str, Any]] | None = None
) -> AsyncIterator[Callable[[Any], None]]:
    """Report how traces grow while the block runs, and what is left at its end.

    Args:
        traces: Those of the attempt that runs.
        about: Returns further fields for each report: the library's clients pass over them.

    Yields:
        What is to be called with each new trace.
    """
    sink = progress.sink.get()
    assert sink is not None

    async def send(delta: dict[str, Any]) -> None:
        with progress.reporting_to(sink):  # this may be a task of the interception's server, which knows no call
            await progress.report({**plain(delta), **(about() if about else {})})

    async with DeltaStreamer(traces, send) as streamer:
        yield streamer.watch


def plain(value: Any) -> Any:
    """The value as the library's own wire delivers it: arrays, paths and the like in its forms."""
    return unpack(pack(value))
