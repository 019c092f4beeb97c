"""A server's side of the bus: admits jobs, answers checks, hands out results. Runs on the bus thread.

Decides through Slots and Jobs and carries out what they say. It never waits
for the environment: user code that blocks delays no answer given here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from envbus.bus.connection import Connection, Listener
from envbus.bus.failures import to_failure
from envbus.bus.inbox import is_closed_notice
from envbus.bus.messages import (
    Accepted,
    Busy,
    Cancel,
    Check,
    Done,
    Failure,
    Fetch,
    Grant,
    Ok,
    Part,
    Pass,
    Run,
    Status,
    Wait,
    WireMessage,
    pack,
    parse,
    parse_map,
    read_map,
)
from envbus.bus.subjects import Subjects
from envbus.bus.transfer import Packed
from envbus.errors import (
    BadRequestError,
    EnvbusError,
    LateRequestError,
    LeaseExpiredError,
    NoServerError,
    ResultLostError,
    ResultTooLargeError,
    ServerStoppingError,
)
from envbus.server import plain_requests
from envbus.server.credits import Credits
from envbus.server.jobs import Expire, Forget, Job, Jobs, JobState, LeaseLimits, Lose, Probe
from envbus.server.outcomes import HeldResult, hold, tell, tell_part
from envbus.server.rollout_log import RolloutLog
from envbus.server.runner import Tally, Work
from envbus.server.slots import AddCredits, SendGrant, Slots, WithdrawCredits
from envbus.server.uploads import Uploads
from envbus.settings import PROBE_TIMEOUT_S, ServerSettings

log = logging.getLogger("envbus.server")

TICK_S = 0.25
BusyReason = Literal["full", "draining", "fingerprint"]


class RunnerPort(Protocol):
    """How the reception reaches the runner on the env's loop."""

    def start(self, work: Work) -> None:
        """Start a job."""

    def cancel(self, job: str) -> None:
        """Cancel a job if it runs."""


class Reception:
    """Takes the jobs of one server.

    Args:
        runner: Where admitted jobs run; reached across threads.
        fingerprint: Of what is served; a pinned client with another is sent on.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        *,
        server_id: str,
        settings: ServerSettings,
        capacity: int,
        fingerprint: str,
        runner: RunnerPort,
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._server_id = server_id
        self._settings = settings
        self._fingerprint = fingerprint
        self._runner = runner
        self.slots = Slots(capacity, grant_ttl_s=settings.grant_ttl_s, wait_ttl_s=settings.wait_ttl_s)
        self.jobs = Jobs(
            LeaseLimits(
                probe_after_s=settings.probe_after_s,
                orphan_grace_s=settings.orphan_grace_s,
                orphan_timeout_s=settings.orphan_timeout_s,
                hold_results_s=settings.hold_results_s,
                hold_results_bytes=settings.hold_results_bytes,
            )
        )
        self.state = "loading"
        self.counts: Counter[str] = Counter()
        self.rollouts = RolloutLog()
        self._credits = Credits(connection, subjects.rollout, self._on_push)
        self._uploads = Uploads(settings.max_input_bytes)
        self._listener = Listener(on_reconnected=self._on_reconnected)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._withdrawing = False

    # ---- life

    async def open(self) -> None:
        """Be reachable, but take no jobs yet."""
        self._connection.listen(self._listener)
        self._subscriptions = [
            await self._connection.subscribe(self._subjects.server(self._server_id), self._guarded(self._on_direct)),
            await self._connection.subscribe(self._subjects.wait, self._guarded(self._on_wait)),
        ]
        self._spawn(self._tick_forever())

    def ready(self) -> None:
        """Take jobs."""
        self.state = "ready"
        self._apply(self.slots.open())

    def drain(self) -> None:
        """Take no more jobs."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
            self._apply(self.slots.close())

    def stop_running(self) -> None:
        """End every job that still runs; its client is told and may send it elsewhere."""
        self.state = "stopping"
        error = ServerStoppingError("the server stopped before the job was done", origin=self._server_id)
        for job in self.jobs.unfinished():
            self._runner.cancel(job.job)
            self._end(job.job, to_failure(error, origin=self._server_id))

    async def idle(self) -> None:
        """Wait until no job runs."""
        while self.slots.in_flight:
            await self._next_change()

    async def collected(self) -> None:
        """Wait until no outcome is held any more."""
        while len(self.jobs):
            await self._next_change()

    async def close(self) -> None:
        """Stop listening; what is still held is dropped."""
        self._connection.unlisten(self._listener)
        for subscription in self._subscriptions:
            await self._connection.leave(subscription)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # ---- from the runner

    def finished(self, job_id: str, outcome: Packed | Failure, tally: Tally) -> None:
        """A job that was started has ended."""
        self.counts["done"] += tally.done
        self.counts["failed"] += tally.failed
        self.counts["cancelled"] += tally.cancelled
        job = self.jobs.get(job_id)
        self.rollouts.add(tally.ended, job.client if job is not None and not job.plain else "")
        self._apply(self.slots.release(job_id, _now()))
        if isinstance(outcome, Failure):
            self._end(job_id, outcome)
        else:
            self._end(job_id, self._held(outcome))

    def _held(self, packed: Packed) -> HeldResult | Failure:
        try:
            return hold(packed, max_payload=self._connection.max_payload, max_bytes=self._settings.max_result_bytes)
        except ResultTooLargeError as error:
            return to_failure(error, origin=self._server_id)

    def _end(self, job_id: str, outcome: HeldResult | Failure) -> None:
        self._uploads.drop(job_id)
        held_bytes = outcome.held_bytes if isinstance(outcome, HeldResult) else 0
        job, instructions = self.jobs.finish(job_id, outcome, held_bytes, _now())
        if job is not None:
            self._tell(job, outcome)
        self._obey(instructions)
        self._changed.set()

    def _tell(self, job: Job, outcome: HeldResult | Failure) -> None:
        limit = self._connection.max_payload
        if job.plain:
            data = plain_requests.answer(outcome, max_payload=limit)
        else:
            data = tell(outcome, job=job.job, attempt=job.attempt, server=self._server_id, max_payload=limit)
        self.counts["sent_bytes"] += len(data)
        self._connection.send(job.reply, data)

    # ---- from clients

    def _on_push(self, message: Any) -> None:
        if not is_closed_notice(message) and not self._connection.is_inbox(message.reply):
            self._apply(self.slots.bounce(_now()))
        self._guarded(self._admit_pushed)(message)

    def _admit_pushed(self, message: Any) -> None:
        try:
            fields = read_map(message.data)
            run = plain_requests.as_run(fields) if "t" not in fields else parse_map(fields)
            if not isinstance(run, Run):
                raise BadRequestError(f"{run.kind!r} does not belong on {self._subjects.rollout}")
        except Exception:
            self._apply(self.slots.bounce(_now()))
            raise
        plain = fields if "t" not in fields else None
        if self._refusal(run) is not None or self.jobs.get(run.job) is not None:
            self._apply(self.slots.bounce(_now()))
            self._again_or_refuse(run, message.reply, plain)
            return
        admitted, instructions = self.slots.push(run.job, run.size, _now())
        self._settle_admission(run, message.reply, admitted, plain)
        self._apply(instructions)

    def _admit_granted(self, run: Run, message: Any) -> None:
        if self._refusal(run) is not None or self.jobs.get(run.job) is not None:
            self._apply(self.slots.waste(run.grant or "", run.client, _now()))
            self._again_or_refuse(run, message.reply, None)
            return
        admitted, instructions = self.slots.redeem(run.grant or "", run.client, run.job, run.size, _now())
        self._settle_admission(run, message.reply, admitted, None)
        self._apply(instructions)

    def _refusal(self, run: Run) -> Literal["expired", "fingerprint"] | None:
        if run.start_by is not None and time.time() > run.start_by:
            return "expired"
        if run.fingerprint is not None and run.fingerprint != self._fingerprint:
            return "fingerprint"
        return None

    def _again_or_refuse(self, run: Run, reply: str, plain: dict[str, Any] | None) -> None:
        """A job that came too late, is for another fingerprint, or is here already."""
        refusal = self._refusal(run)
        if refusal == "expired":
            self.counts["expired"] += 1
            raise LateRequestError(
                f"job {run.job} reached the server {time.time() - (run.start_by or 0.0):.1f} s too late; "
                "if it was just sent, the clocks of the two hosts differ",
                origin=self._server_id,
            )
        elif refusal is not None:
            self._say_busy(run, reply, plain, refusal)
        elif (job := self.jobs.owned(run.job, run.client)) is not None:
            self.counts["repeated"] += 1
            job.reply, job.attempt = reply, run.attempt
            self._accept(run, reply)
            if job.state is JobState.DONE:
                self._tell(job, job.outcome)

    def _settle_admission(self, run: Run, reply: str, admitted: bool, plain: dict[str, Any] | None) -> None:
        if not admitted:
            self._say_busy(run, reply, plain, "full" if self.state == "ready" else "draining")
            return
        now = _now()
        job = Job(run.job, run.client if plain is None else reply, run.attempt, run.size, reply, now)
        job.plain = plain is not None
        self.jobs.add(job, now)
        self.counts["jobs"] += 1
        self.counts["retried"] += run.attempt > 1
        self.counts["received_bytes"] += len(run.body or b"")
        log.debug("job %s attempt %d accepted from client %s", run.job, run.attempt, run.client)
        if plain is not None:
            self._start(job, Work(run.job, run.size, call=plain, compress=False))
            return
        self._accept(run, reply)
        try:
            if run.upload is not None:
                self._uploads.begin(run.job, run.upload)
            elif run.body is not None:
                limit = self._settings.max_input_bytes
                self._start(job, Work(run.job, run.size, run.body, run.encoding, max_input_bytes=limit))
            else:
                raise BadRequestError("run: neither 'body' nor 'upload' is there")
        except EnvbusError as error:
            self._apply(self.slots.release(run.job, now))
            self._end(run.job, to_failure(error, origin=self._server_id))

    def _start(self, job: Job, work: Work) -> None:
        job.state = JobState.RUNNING
        self._runner.start(work)

    def _accept(self, run: Run, reply: str) -> None:
        self._connection.send(reply, pack(Accepted(job=run.job, attempt=run.attempt, server=self._server_id)))

    def _say_busy(self, run: Run, reply: str, plain: dict[str, Any] | None, reason: BusyReason) -> None:
        self.counts["busy"] += 1
        if plain is not None:
            self._connection.send(reply, plain_requests.busy(reason))
            return
        busy = Busy(job=run.job, attempt=run.attempt, server=self._server_id, reason=reason)
        self._connection.send(reply, pack(busy))

    def _on_wait(self, message: Any) -> None:
        wait = parse(message.data)
        if not isinstance(wait, Wait):
            raise BadRequestError(f"{wait.kind!r} does not belong on {self._subjects.wait}")
        self.jobs.heard(wait.client, "", _now())
        state = self.state
        if wait.fingerprint is not None and wait.fingerprint != self._fingerprint:
            state = "fingerprint"
        self._connection.send(message.reply, pack(Ok(server=self._server_id, state=state)))
        if state == "ready":
            self._apply(
                self.slots.wait(wait.client, inbox=message.reply, jobs=wait.n, priority=wait.priority, now=_now())
            )

    def _on_direct(self, message: Any) -> None:
        request = parse(message.data)
        if isinstance(request, Run):
            self._admit_granted(request, message)
            return
        answer = self._answer(request, message.reply)
        if answer is not None:
            self._connection.send(message.reply, pack(answer))

    def _answer(self, request: WireMessage, reply: str) -> WireMessage | None:
        client = getattr(request, "client", None)
        if client is not None:
            self.jobs.heard(client, reply, _now())
        match request:
            case Check():
                return self._status(request)
            case Fetch():
                return self._part(request)
            case Part():
                return self._take_part(request)
            case Cancel() | Done():
                self._obey(self.jobs.release(request.jobs, request.client))
                self._changed.set()
            case Pass():
                self._apply(self.slots.decline(request.grant, request.client, _now()))
            case _:
                raise BadRequestError(f"{request.kind!r} does not belong on a server's subject")
        return Ok(server=self._server_id, state=self.state)

    def _status(self, check: Check) -> Status:
        status = Status(server=self._server_id, running=[], unknown=[], done=[], failed=[])
        for job_id in check.jobs:
            job = self.jobs.owned(job_id, check.client)
            if job is None:
                status.unknown.append(job_id)
            elif job.state is not JobState.DONE:
                status.running.append(job_id)
            elif isinstance(job.outcome, Failure):
                told = {"job": job_id, "attempt": job.attempt, "server": self._server_id}
                status.failed.append(job.outcome.model_copy(update=told))
            else:
                status.done.append(job_id)
        return status

    def _part(self, fetch: Fetch) -> WireMessage:
        job = self.jobs.owned(fetch.job, fetch.client)
        if job is None or not isinstance(job.outcome, HeldResult):
            raise ResultLostError(f"no result of job {fetch.job} is held here", origin=self._server_id)
        part = tell_part(job.outcome, job=fetch.job, index=fetch.index)
        self.counts["sent_bytes"] += len(part.data)
        return part

    def _take_part(self, part: Part) -> WireMessage:
        job = self.jobs.owned(part.job, part.client)
        if job is None:
            raise BadRequestError(f"no input of job {part.job} is awaited here")
        self.counts["received_bytes"] += len(part.data)
        body = self._uploads.put(part.job, part.index, part.data)
        if body is not None and job.state is JobState.RECEIVING:
            self._start(job, Work(part.job, job.size, body, max_input_bytes=self._settings.max_input_bytes))
        return Ok(server=self._server_id, state=self.state)

    # ---- instructions

    def _apply(self, instructions: Iterable[AddCredits | WithdrawCredits | SendGrant]) -> None:
        for instruction in instructions:
            match instruction:
                case AddCredits(count=count):
                    self._spawn(self._add_credits(count))
                case WithdrawCredits():
                    self._spawn(self._withdraw())
                case SendGrant(inbox=inbox, grant=grant):
                    message = Grant(grant=grant, server=self._server_id, ttl_s=self._settings.grant_ttl_s)
                    self._connection.send(inbox, pack(message))
        self._changed.set()

    def _obey(self, instructions: Iterable[Probe | Expire | Lose | Forget]) -> None:
        for instruction in instructions:
            match instruction:
                case Probe(client=client, inbox=inbox):
                    self._spawn(self._probe(client, inbox))
                case Forget(job=job_id):
                    self._stop(job_id)
                case Expire(job=job_id, reason=reason):
                    self.counts["orphaned"] += 1
                    log.warning("job %s: %s; cancelled", job_id, reason)
                    self._stop(job_id)
                    self._replace(job_id, LeaseExpiredError(reason, origin=self._server_id))
                case Lose(job=job_id, reason=reason):
                    self.counts["lost_results"] += 1
                    log.error("the result of job %s was dropped: %s", job_id, reason)
                    self._replace(job_id, ResultLostError(reason, origin=self._server_id))

    def _stop(self, job_id: str) -> None:
        """Cancel a job. One whose input has not arrived yet runs nowhere: its slot is free at once."""
        if self._uploads.drop(job_id):
            self._apply(self.slots.release(job_id, _now()))
        self._runner.cancel(job_id)

    def _replace(self, job_id: str, error: EnvbusError) -> None:
        self.jobs.replace_outcome(job_id, to_failure(error, origin=self._server_id), _now())

    async def _add_credits(self, count: int) -> None:
        if self._connection.is_up:
            await self._credits.add(count)

    async def _withdraw(self) -> None:
        if self._withdrawing:
            return
        self._withdrawing = True
        try:
            await self._credits.withdraw()
        finally:
            self._withdrawing = False
        self._apply(self.slots.credits_gone(_now()))

    async def _probe(self, client: str, inbox: str) -> None:
        """Ask nobody in particular: only whether NATS knows a subscriber matters."""
        gone = False
        try:
            await self._connection.request(inbox, pack(Ok(server=self._server_id)), timeout_s=PROBE_TIMEOUT_S / 2)
        except NoServerError:
            gone = True
        except (TimeoutError, EnvbusError):
            pass
        self.jobs.probe_answered(client, gone=gone, now=_now())

    # ---- time and outages

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._connection.is_up:
                self._apply(self.slots.tick(_now()))
                instructions = self.jobs.tick(_now())
                self.counts["orphaned"] += sum(isinstance(instruction, Forget) for instruction in instructions)
                self._obey(instructions)

    def _on_reconnected(self, outage_s: float) -> None:
        self.jobs.shift_clocks(outage_s)
        self._spawn(self._withdraw())

    # ---- guarding

    def _guarded(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def handle(message: Any) -> None:
            if is_closed_notice(message):
                return
            if not self._connection.is_inbox(message.reply):
                self.counts["no_inbox"] += 1
                log.warning("a message on %s without an inbox to reply to was dropped", message.subject)
                return
            try:
                handler(message)
            except EnvbusError as error:
                self.counts["refused"] += 1
                self._refuse(message, error)
            except Exception as error:
                log.exception("a message on %s could not be handled", message.subject)
                self._refuse(message, error)

        return handle

    def _refuse(self, message: Any, error: Exception) -> None:
        if message.subject == self._subjects.rollout and plain_requests.is_plain(message.data):
            self._connection.send(message.reply, plain_requests.refusal(error))
        else:
            self._connection.send(message.reply, pack(to_failure(error, origin=self._server_id)))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the reception failed", exc_info=task.exception())


def _now() -> float:
    return time.monotonic()
