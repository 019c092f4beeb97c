"""Runs calls on the environment's own event loop, each in a task of its own.

Owns these tasks: every one ends with exactly one outcome handed back, and all
are cancelled and awaited by stop(). What an environment raises is a failed
rollout (data), not a failed call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from envbus.bus.calls import Call, read_call
from envbus.bus.codec import Limits, decode_map, encode
from envbus.bus.failures import to_failure
from envbus.bus.messages import Failure
from envbus.bus.transfer import COMPRESS_OVER_BYTES, Packed, pack_body, unpack_body
from envbus.errors import BadRequestError, CallCancelledError, EncodeError, EnvbusError
from envbus.evaluation.rows import checked_outputs, failed_output
from envbus.server.model_endpoints import ModelEndpoints
from envbus.server.rollout_log import EndedRollout, ended_rollout
from envbus.settings import MAX_BODY_BYTES
from envbus.types import HostableEnvironment, RolloutInput, RolloutOutput

log = logging.getLogger("envbus.server")

RESULT_LIMITS = Limits(max_bytes=MAX_BODY_BYTES)
"""The ceiling for results is the server's setting, which is checked once a result is encoded."""


@dataclass(frozen=True, slots=True)
class Work:
    """One admitted job. ``call`` is the map of a plain request; else ``body`` holds it."""

    job: str
    size: int
    body: bytes = b""
    encoding: Any = ""
    call: Mapping[str, Any] | None = None
    max_input_bytes: int = 0
    compress: bool = True


Report = Callable[[str, Packed | Failure, "Tally"], None]
"""Gets ``(job id, outcome, tally)``; called on the env's loop."""


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
        report: Called once with the outcome of each job that was started.
        server_id: Origin of the failures reported.
    """

    def __init__(
        self, environment: HostableEnvironment, *, endpoints: ModelEndpoints, report: Report, server_id: str
    ) -> None:
        self._environment = environment
        self._endpoints = endpoints
        self._report = report
        self._server_id = server_id
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, work: Work) -> None:
        """Start a job; on the env's loop."""
        task = asyncio.get_running_loop().create_task(self._run(work), name=f"job {work.job}")
        self._tasks[work.job] = task
        task.add_done_callback(lambda task: self._on_done(work.job, task))

    def cancel(self, job: str) -> None:
        """Cancel a job if it runs; its outcome is still reported."""
        task = self._tasks.get(job)
        if task is not None and not task.cancelling():  # a second cancel would cut its cleanup short
            task.cancel()

    async def stop(self, *, timeout_s: float) -> None:
        """Cancel all jobs and wait for their cleanup, so long at most."""
        for job in list(self._tasks):
            self.cancel(job)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)
        for job in self._tasks:
            log.error("job %s did not end within %g s of its cancel; it is left", job, timeout_s)

    def _on_done(self, job: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(job, None)
        if task.cancelled():  # before its first step, so that nothing of _run() ran
            failure = to_failure(CallCancelledError("cancelled on the server"), origin=self._server_id)
            self._report(job, failure, Tally(cancelled=1))

    async def _run(self, work: Work) -> None:
        tally, started = Tally(), time.monotonic()
        outcome: Packed | Failure
        try:
            outcome = await self._outcome(work, tally)
        except asyncio.CancelledError:
            tally.cancelled += 1
            outcome = to_failure(CallCancelledError("cancelled on the server"), origin=self._server_id)
        except EnvbusError as error:
            outcome = self._failure(error, tally, started)
        except Exception as error:
            log.exception("job %s: unexpected error", work.job)
            outcome = self._failure(error, tally, started)
        self._report(work.job, outcome, tally)

    def _failure(self, error: Exception, tally: Tally, started: float) -> Failure:
        tally.failed += 1
        tally.ended.append(EndedRollout("?", None, type(error).__name__, time.monotonic() - started))
        return to_failure(error, origin=self._server_id)

    async def _outcome(self, work: Work, tally: Tally) -> Packed:
        call = read_call(work.call if work.call is not None else self._decode(work))
        if call.kind == "rollout" and self._environment.requires_group_rollouts:
            raise BadRequestError("this environment scores its rollouts in groups: call run_group")
        if call.size != work.size:
            raise BadRequestError(f"the job claimed {work.size} slots for {call.size} inputs")
        started = time.monotonic()
        outputs = await self._outputs(call)
        body = _encode_outputs(call, outputs, tally, job_s=time.monotonic() - started)
        if work.compress and len(body) > COMPRESS_OVER_BYTES:
            return await asyncio.to_thread(pack_body, body)
        return Packed(body, "", len(body))

    def _decode(self, work: Work) -> dict[str, Any]:
        return decode_map(unpack_body(work.body, work.encoding, max_bytes=work.max_input_bytes))

    async def _outputs(self, call: Call) -> list[RolloutOutput]:
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
            log.warning("%s failed in the environment: %s", call.kind, type(error).__name__, exc_info=error)
            return [_failed(item, error, started_at, time.monotonic() - started) for item in call.inputs]

    def _call(self, call: Call) -> Awaitable[Any]:
        client = self._endpoints.client(call.client) if call.client is not None else None
        options: dict[str, Any] = {"max_retries": call.max_retries, "state_columns": call.state_columns}
        if call.kind == "group":
            return self._environment.run_group(call.inputs, client, call.model, call.sampling_args, **options)
        return self._environment.run_rollout(call.inputs[0], client, call.model, call.sampling_args, **options)


def _encode_outputs(call: Call, outputs: list[RolloutOutput], tally: Tally, *, job_s: float) -> bytes:
    """Encode a whole result; an output that cannot be encoded fails alone, its group is kept."""
    try:
        body = encode(_result_map(call, outputs), limits=RESULT_LIMITS)
    except EncodeError:
        outputs = [_encodable(item, output) for item, output in zip(call.inputs, outputs, strict=True)]
        body = encode(_result_map(call, outputs), limits=RESULT_LIMITS)
    failed = sum(output.get("error") is not None for output in outputs)
    tally.failed += failed
    tally.done += len(outputs) - failed
    tally.ended += [ended_rollout(output, job_s=job_s) for output in outputs]
    return body


def _result_map(call: Call, outputs: list[RolloutOutput]) -> dict[str, Any]:
    return {"output": outputs[0]} if call.kind == "rollout" else {"outputs": outputs}


def _encodable(item: RolloutInput, output: RolloutOutput) -> RolloutOutput:
    try:
        encode(output, limits=RESULT_LIMITS)
    except EncodeError as error:
        return _failed(item, error, time.time(), 0.0)
    return output


def _failed(item: RolloutInput, error: BaseException, start_time: float, total_s: float) -> RolloutOutput:
    example_id = item.get("example_id", 0)
    return failed_output(item, error, example_id=example_id, start_time=start_time, total_s=total_s)
