"""Runs calls on the environment's own event loop, each in a task of its own.

Owns these tasks: every one ends with exactly one outcome handed back, and all
are cancelled and awaited by stop(). What an environment raises is a failed
rollout (data), not a failed call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from envbus.bus.bodies import BodyWorkers
from envbus.bus.calls import Call, read_call
from envbus.bus.codec import DEFAULT_LIMITS
from envbus.bus.failures import to_failure
from envbus.bus.messages import Failure
from envbus.bus.transfer import Packed
from envbus.environments.progress import reporting_to
from envbus.errors import BadRequestError, CallCancelledError, EnvbusError
from envbus.evaluation.rows import checked_outputs
from envbus.job_log import JobLog
from envbus.server.model_endpoints import ModelEndpoints
from envbus.server.outlet import Outlet
from envbus.server.results import ResultBody, failed
from envbus.server.rollout_log import EndedRollout, ended_rollout
from envbus.server.turns import CopyTurns
from envbus.types import HostableEnvironment, RolloutOutput

log = logging.getLogger("envbus.server")


@dataclass(frozen=True, slots=True)
class Work:
    """One admitted job.

    Attributes:
        call: The map of a plain request.
        body: Returns the call's bytes otherwise, decompressed and checked; not on a loop if they are many.
        body_bytes: How many they are.
        progress: The attempt to report progress of; None: nobody asked for any.
    """

    job: str
    size: int
    call: Mapping[str, Any] | None = None
    body: Callable[[], bytes] = bytes
    body_bytes: int = 0
    compress: bool = True
    progress: int | None = None


Report = Callable[[str, Packed | Failure, "Tally"], None]
"""Gets ``(job id, outcome, tally)``; called on the env's loop."""
SendProgress = Callable[[str, int, bytes], None]
"""Gets ``(job id, attempt, body)`` of each progress report; called on the env's loop."""


@dataclass(slots=True)
class Tally:
    """Rollouts of one job by how they ended."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    ended: list[EndedRollout] = field(default_factory=list)
    """Those that were not cancelled."""


class Runner:
    """Runs the jobs of one server.

    Args:
        environment: What is served.
        endpoints: Makes model clients, and decides which keys they may use.
        workers: Pack and unpack large bodies.
        report: Called once with the outcome of each job that was started.
        progress: Called with what jobs report while they run.
        progress_window_bytes: Of one job's progress, on its way to the caller.
        server_id: Origin of the failures reported.
        env: Named in the log.
    """

    def __init__(
        self,
        environment: HostableEnvironment,
        *,
        endpoints: ModelEndpoints,
        workers: BodyWorkers,
        report: Report,
        progress: SendProgress,
        progress_window_bytes: int,
        server_id: str,
        env: str,
    ) -> None:
        self._environment = environment
        self._endpoints = endpoints
        self._workers = workers
        self._turns = CopyTurns()
        self._report = report
        self._progress = progress
        self._progress_window_bytes = progress_window_bytes
        self._outlets: dict[str, Outlet] = {}
        self._server_id = server_id
        self._log = JobLog(log, server=server_id, env=env)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, work: Work) -> None:
        """Start a job; on the env's loop."""
        task = asyncio.get_running_loop().create_task(self._run(work), name=f"job {work.job}")
        self._tasks[work.job] = task
        task.add_done_callback(lambda task: self._on_done(work.job, task))

    def cancel(self, job: str) -> None:
        """Cancel a job if it runs; its outcome is still reported, but no progress any more."""
        if (outlet := self._outlets.get(job)) is not None:
            outlet.close()  # nobody takes it: a report in the environment's cleanup would wait for ever
        task = self._tasks.get(job)
        if task is not None and not task.cancelling():  # a second cancel would cut its cleanup short
            task.cancel()

    def heard(self, job: str, attempt: int, freed_bytes: int) -> None:
        """The caller of a job has taken so much of its progress."""
        outlet = self._outlets.get(job)
        if outlet is not None and outlet.attempt == attempt:
            outlet.heard(freed_bytes)

    async def stop(self, *, timeout_s: float) -> None:
        """Cancel all jobs and wait for their cleanup, so long at most."""
        for job in list(self._tasks):
            self.cancel(job)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)
        for job in self._tasks:
            self._log.trouble(
                "job left", job, f"it did not end within {timeout_s:g} s of its cancel", level=logging.ERROR
            )
        self._log.close()

    def _on_done(self, job: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(job, None)
        if task.cancelled():  # before its first step, so that nothing of _run() ran
            failure = to_failure(CallCancelledError("cancelled on the server"), origin=self._server_id)
            self._report(job, failure, Tally(cancelled=1))
        elif (error := task.exception()) is not None:  # one that is no Exception
            who = {"job": job, "server": self._server_id}
            log.error("a job ended without an outcome", exc_info=error, extra=who)
            self._report(job, to_failure(error, origin=self._server_id), Tally(failed=1))

    async def _run(self, work: Work) -> None:
        tally, started = Tally(), time.monotonic()
        outcome: Packed | Failure
        self._log.step("started", work.job, bytes=work.body_bytes)
        try:
            with self._reporting(work):
                outcome = await self._outcome(work, tally)
        except asyncio.CancelledError:
            tally.cancelled += 1
            outcome = to_failure(CallCancelledError("cancelled on the server"), origin=self._server_id)
        except EnvbusError as error:
            outcome = self._failure(error, tally, started)
        except Exception as error:
            log.exception("a job had an unexpected error", extra={"job": work.job, "server": self._server_id})
            outcome = self._failure(error, tally, started)
        self._report(work.job, outcome, tally)

    @contextmanager
    def _reporting(self, work: Work) -> Iterator[None]:
        """Within this context the environment finds where to report progress, if somebody asked."""
        if work.progress is None:
            yield
            return
        outlet = self._outlets[work.job] = Outlet(
            attempt=work.progress,
            window_bytes=self._progress_window_bytes,
            workers=self._workers,
            send=partial(self._progress, work.job, work.progress),
        )
        try:
            with reporting_to(outlet):
                yield
        finally:
            outlet.close()
            if self._outlets.get(work.job) is outlet:
                del self._outlets[work.job]

    def _failure(self, error: Exception, tally: Tally, started: float) -> Failure:
        tally.failed += 1
        tally.ended.append(EndedRollout("?", None, type(error).__name__, time.monotonic() - started))
        return to_failure(error, origin=self._server_id)

    async def _outcome(self, work: Work, tally: Tally) -> Packed:
        call = read_call(work.call if work.call is not None else await self._read(work))
        if call.kind == "rollout" and self._environment.requires_group_rollouts:
            raise BadRequestError("this environment scores its rollouts in groups: call run_group")
        if call.size != work.size:
            raise BadRequestError(f"the job claimed {work.size} slots for {call.size} inputs")
        started = time.monotonic()
        outputs = await self._outputs(call, work.job)
        job_s = time.monotonic() - started
        result = ResultBody(call, outputs)
        del outputs  # what is left of a large one dies in slices, once it is packed
        async with self._turns.copied(result.frozen):
            packed = await self._workers.packing(result.encode, result.frozen, compress=work.compress)
        _count(result.outputs, tally, job_s=job_s)
        return packed

    async def _read(self, work: Work) -> dict[str, Any]:
        return await self._workers.unpack(work.body, work.body_bytes, limits=DEFAULT_LIMITS)

    async def _outputs(self, call: Call, job: str) -> list[RolloutOutput]:
        started_at, started = time.time(), time.monotonic()
        try:
            answer = await self._call(call)
            return checked_outputs([answer] if call.kind == "rollout" else answer, call.size)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # whatever an environment raises is a failed rollout; panics are no Exception
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            text = "%s failed in the environment: %s"
            log.warning(text, call.kind, type(error).__name__, exc_info=error, extra={"job": job})
            total_s = time.monotonic() - started
            return [failed(item, error, start_time=started_at, total_s=total_s) for item in call.inputs]

    def _call(self, call: Call) -> Awaitable[Any]:
        client = self._client(call)
        options: dict[str, Any] = {"max_retries": call.max_retries, "state_columns": call.state_columns}
        if call.kind == "group":
            return self._environment.run_group(call.inputs, client, call.model, call.sampling_args, **options)
        return self._environment.run_rollout(call.inputs[0], client, call.model, call.sampling_args, **options)

    def _client(self, call: Call) -> Any:
        if getattr(self._environment, "wants_client_config", False) is True:
            return self._endpoints.checked(call.client, loopback=call.loopback)
        return self._endpoints.client(call.client, loopback=call.loopback) if call.client is not None else None


def _count(outputs: list[RolloutOutput], tally: Tally, *, job_s: float) -> None:
    failures = sum(output.get("error") is not None for output in outputs)
    tally.failed += failures
    tally.done += len(outputs) - failures
    tally.ended += [ended_rollout(output, job_s=job_s) for output in outputs]
