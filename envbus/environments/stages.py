"""Running one stage of a rollout: errors become the state's ``error``, time limits hold, cleanup always finishes.

A cancel from outside is never swallowed; everything that a stage started is done when it leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tenacity

from envbus.environments.state import State
from envbus.error_chain import ErrorChain
from envbus.errors import InfraError, InvalidModelResponseError, RolloutError, RolloutTimeoutError

logger = logging.getLogger(__name__)

CLEANUP_LIMIT_S = 60.0
"""Longest time that the cleanup hooks of a rollout may take."""
TEARDOWN_LIMIT_S = 600.0
"""Longest time that the teardown hooks of an environment may take; a server's teardown_timeout_s comes before it."""
RETRY_INITIAL_S = 1.0
RETRY_MAX_S = 60.0


@contextmanager
def capture_errors(*states: State) -> Iterator[None]:
    """Put what the block raises into each state's ``error``; a later error does not replace the first."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled this task: the environment's own code leaked the cancel of something it awaited.
        leaked = RolloutError("the rollout awaited something that was cancelled")
        leaked.__cause__ = error
        _set_error(states, leaked)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a failed rollout is data, whatever it raised
        _set_error(states, error)


async def limited(work: Coroutine[Any, Any, None], *, what: str, limit_s: float | None) -> None:
    """Await ``work``; past its limit it is cancelled, awaited, and RolloutTimeoutError raised."""
    try:
        async with asyncio.timeout(limit_s) as scope:
            await work
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise RolloutTimeoutError(f"{what} took longer than timeout_seconds = {limit_s:g}") from error


async def finish(work: Coroutine[Any, Any, None], *, limit_s: float) -> None:
    """Await cleanup ``work`` to its end, or its limit, even when this task is cancelled meanwhile."""
    task = asyncio.create_task(_bounded(work, limit_s))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            logger.warning("cleanup after a cancel failed: %r", ErrorChain(failure))
        raise cancelled
    task.result()


async def _bounded(work: Coroutine[Any, Any, None], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        await work


def is_retryable(state: State) -> bool:
    """Whether the rollout failed for a reason that max_retries covers."""
    error = state.get("error")
    if not isinstance(error, BaseException):
        return False
    chain = ErrorChain(error)
    return InfraError in chain or InvalidModelResponseError in chain


def retrying(max_retries: int) -> tenacity.AsyncRetrying:
    """Tries a rollout again, with jittered waits, while it fails retryably; the last state is the result."""
    return tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(max(0, max_retries) + 1),
        wait=tenacity.wait_random_exponential(multiplier=RETRY_INITIAL_S, max=RETRY_MAX_S),
        retry=tenacity.retry_if_result(is_retryable),
        retry_error_callback=lambda attempt: attempt.outcome.result() if attempt.outcome else None,
        before_sleep=_log_retry,
    )


def _log_retry(attempt: tenacity.RetryCallState) -> None:
    if attempt.outcome is not None:
        error = ErrorChain(attempt.outcome.result()["error"])
        logger.warning("rollout attempt %d failed, trying again: %r", attempt.attempt_number, error)


def _set_error(states: Iterable[State], error: BaseException) -> None:
    for state in states:
        if state.get("error") is None:
            state["error"] = error
        else:
            logger.warning("a failed rollout failed again: %r", ErrorChain(error))
