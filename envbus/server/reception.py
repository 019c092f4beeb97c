"""A server's side of the bus: admits jobs, answers checks, hands out results. Runs on the bus thread.

Decides through Slots and Jobs and carries out what they say. It never waits
for the environment: user code that blocks delays no answer given here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from envbus.bus.connection import Connection, Listener
from envbus.bus.dialer import return_after_s
from envbus.bus.failures import to_failure
from envbus.bus.inbox import MAPPED_INBOX, is_closed_notice
from envbus.bus.messages import (
    Cancel,
    Check,
    Done,
    Failure,
    Fetch,
    Grant,
    Heard,
    Ok,
    Part,
    Pass,
    Run,
    Wait,
    WireMessage,
    pack,
    parse,
)
from envbus.bus.subjects import WORK_QUEUE, Subjects
from envbus.bus.tasks import TaskSet
from envbus.bus.transfer import Packed
from envbus.errors import (
    BadRequestError,
    EnvbusError,
    LeaseExpiredError,
    NoServerError,
    ResultLostError,
    ResultTooLargeError,
    ServerStoppingError,
)
from envbus.job_log import JobLog
from envbus.server import plain_requests
from envbus.server.admission import Admission
from envbus.server.answers import Answers
from envbus.server.credits import Credits
from envbus.server.guard import Guard
from envbus.server.jobs import Expire, Forget, Job, Jobs, JobState, LeaseLimits, LetGo, Lose, Probe
from envbus.server.outcomes import HeldResult, held_size_bytes, hold, is_one_message, tell
from envbus.server.pressure import Pressure
from envbus.server.rollout_log import RolloutLog
from envbus.server.runner import Tally, Work
from envbus.server.slots import AddCredits, SendGrant, Slots, WithdrawCredits
from envbus.server.streams import Streams
from envbus.server.uploads import Uploads
from envbus.settings import PROBE_TIMEOUT_S, ServerSettings

log = logging.getLogger("envbus.server")

TICK_S = 0.25


class RunnerPort(Protocol):
    """How the reception reaches the runner on the env's loop."""

    def start(self, work: Work) -> None:
        """Start a job."""

    def cancel(self, job: str) -> None:
        """Cancel a job if it runs."""

    def heard(self, job: str, attempt: int, freed_bytes: int) -> None:
        """The caller of a job has taken so much of its progress."""


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
        self._runner = runner
        self.slots = Slots(
            capacity,
            grant_ttl_s=settings.grant_ttl_s,
            wait_ttl_s=settings.wait_ttl_s,
            max_inputs_bytes=settings.hold_inputs_bytes,
        )
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
        self._log = JobLog(log, server=server_id, env=subjects.env)
        self.notices = self._log.notices
        self._pressure = Pressure(self.jobs, self.slots, self.notices, settings)
        self._guard = Guard(connection, server_id=server_id, counts=self.counts, notices=self.notices)
        self.streams = Streams(
            connection,
            self.jobs,
            server_id=server_id,
            window_bytes=settings.progress_window_bytes,
            heard=runner.heard,
            counts=self.counts,
        )
        self._answers = Answers(self.jobs, self._uploads, server_id=server_id, counts=self.counts)
        self._admission = Admission(
            connection,
            self,
            slots=self.slots,
            jobs=self.jobs,
            uploads=self._uploads,
            streams=self.streams,
            counts=self.counts,
            log=self._log,
            server_id=server_id,
            fingerprint=fingerprint,
            max_input_bytes=settings.max_input_bytes,
        )
        self._admit_pushed = self._guard.around(self._admission.pushed, refusal=self._refusal)
        self._listener = Listener(on_reconnected=self._on_reconnected)
        self._tasks = TaskSet("the reception")
        self._changed = asyncio.Event()
        self._withdrawing = False
        self._trust_503_from = 0.0

    # ---- life

    async def open(self) -> None:
        """Be reachable, but take no jobs yet."""
        self._connection.listen(self._listener)
        self._subscriptions = [
            await self._connection.subscribe(
                self._subjects.server(self._server_id), self._guard.around(self._on_direct)
            ),
            await self._connection.subscribe(self._subjects.wait, self._guard.around(self._on_wait)),
        ]
        self._tasks.repeat(self._tick, every_s=TICK_S)

    async def ready(self) -> None:
        """Take jobs.

        Raises:
            BusPermissionError: This server's user may not hear what clients send.
        """
        self.state = "ready"
        self.apply(self.slots.open())
        await asyncio.sleep(0)  # the place in the queue group is taken by a task
        await self._connection.check_allowed(self._subjects.rollout)

    async def try_queue(self) -> None:
        """Join the queue group of jobs and leave it at once, so that NATS judges it before the environment is loaded.

        A job that comes in between is told to go elsewhere.
        """
        subject = self._subjects.rollout
        await self._connection.leave(await self._connection.subscribe(subject, self._on_push, queue=WORK_QUEUE))

    def drain(self) -> None:
        """Take no more jobs."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
            self.apply(self.slots.close())

    def stop_running(self) -> None:
        """End every job that still runs; its client is told and may send it elsewhere."""
        self.state = "stopping"
        error = ServerStoppingError("the server stopped before the job was done", origin=self._server_id)
        for job in self.jobs.unfinished():
            self._stop(job.job)
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
        await self._tasks.close()
        self._log.close()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # ---- from the runner

    def finished(self, job_id: str, outcome: Packed | Failure, tally: Tally) -> None:
        """A job that was started has ended: whatever goes wrong here, its client is told and its slot is free."""
        job = self.jobs.get(job_id)
        try:
            self._count(tally, job)
            # The outcome is counted before its slot is free: nothing comes in for memory that it takes.
            self._end(job_id, outcome if isinstance(outcome, Failure) else self._held(outcome))
        except Exception as error:
            log.exception("the outcome of a job could not be told", extra={"job": job_id, "server": self._server_id})
            if job is not None:
                self._end_in_error(job, error)
        finally:
            self.apply(self.slots.release(job_id, _now()))

    def _count(self, tally: Tally, job: Job | None) -> None:
        self.counts["done"] += tally.done
        self.counts["failed"] += tally.failed
        self.counts["cancelled"] += tally.cancelled
        self.rollouts.add(tally.ended, job.client if job is not None and not job.plain else "")

    def _end_in_error(self, job: Job, error: Exception) -> None:
        """Whether it had its outcome already or not."""
        failure = self._failure(error)
        self.jobs.finish(job.job, failure, size_bytes=held_size_bytes(failure), is_failure=True, now=_now())
        self._replace(job.job, failure)
        self._tell(job, failure)

    def _held(self, packed: Packed) -> HeldResult | Failure:
        try:
            return hold(packed, max_payload=self._connection.max_payload, max_bytes=self._settings.max_result_bytes)
        except ResultTooLargeError as error:
            return to_failure(error, origin=self._server_id)

    def _end(self, job_id: str, outcome: HeldResult | Failure) -> None:
        self._uploads.drop(job_id)
        job = self.jobs.finish(
            job_id, outcome, size_bytes=held_size_bytes(outcome), is_failure=isinstance(outcome, Failure), now=_now()
        )
        if job is None:
            self._log.step("ended, nobody waits for it", job_id)
        else:
            self._log_end(job, outcome)
            self._tell(job, outcome)
        self.apply(self._pressure.weigh(_now()))

    def _log_end(self, job: Job, outcome: HeldResult | Failure) -> None:
        if self._log.is_detailed:
            self._log.step(
                "ended",
                job.job,
                attempt=job.attempt,
                client=job.client,
                state=outcome.code if isinstance(outcome, Failure) else "result",
                seconds=round(_now() - job.created_at, 3),
                bytes=held_size_bytes(outcome),
            )

    def _tell(self, job: Job, outcome: HeldResult | Failure) -> None:
        limit = self._connection.max_payload
        if job.plain:
            data = plain_requests.answer(outcome, max_payload=limit)
        else:
            data = tell(
                outcome,
                job=job.job,
                attempt=job.attempt,
                server=self._server_id,
                max_payload=limit,
                progress=self.streams.told(job),
            )
            if is_one_message(outcome, max_payload=limit):
                self.jobs.sent(job.job, _now())
        self.counts["sent_bytes"] += len(data)
        self._connection.send(job.reply, data)

    # ---- from clients

    def _on_push(self, message: Any) -> None:
        if not is_closed_notice(message) and not self._connection.is_inbox(message.reply):
            self.apply(self.slots.bounce(_now()))
        self._admit_pushed(message)

    def _on_wait(self, message: Any) -> None:
        wait = parse(message.data)
        if not isinstance(wait, Wait):
            raise BadRequestError(f"{wait.kind!r} does not belong on {self._subjects.wait}")
        self.jobs.heard(wait.client, "", _now())
        state = self.state
        if self._admission.is_other_fingerprint(wait.fingerprint):
            state = "fingerprint"
        self._connection.send(message.reply, pack(Ok(server=self._server_id, state=state)))
        if state == "ready":
            self._put_in_line(wait, message.reply)

    def _put_in_line(self, wait: Wait, inbox: str) -> None:
        line = self.slots.line
        turned_away = line.turned_away
        priority = min(wait.priority, self._settings.max_priority)
        self.apply(self.slots.wait(wait.client, inbox=inbox, jobs=wait.n, priority=priority, now=_now()))
        if line.turned_away > turned_away:
            self.notices.note("line full", f"{len(line):,} clients wait: client {wait.client} was turned away", _now())

    def _on_direct(self, message: Any) -> None:
        request = parse(message.data)
        if isinstance(request, Run):
            self._admission.granted(request, message.reply)
        else:
            self._connection.send(message.reply, pack(self._answer(request, message.reply)))

    def _answer(self, request: WireMessage, reply: str) -> WireMessage:
        client = getattr(request, "client", None)
        if client is not None:
            self.jobs.heard(client, reply, _now())
        match request:
            case Check():
                self.streams.checked(request)
                return self._answers.status(request, _now(), node=self._connection.node)
            case Fetch():
                return self._answers.part_of_result(request, _now())
            case Part():
                if (whole := self._answers.take_part(request, _now())) is not None:
                    job, assembly = whole
                    body, size_bytes = assembly.body, assembly.parts.raw_size
                    work = Work(job.job, job.size, body=body, body_bytes=size_bytes, progress=job.progress_attempt)
                    self.start(job, work)
            case Heard():
                self.streams.heard(request, reply)
            case Cancel() | Done():
                self._log_release(request)
                self._obey(self.jobs.release(request.jobs, request.client))
                self.apply(self._pressure.weigh(_now()))
            case Pass():
                self.apply(self.slots.decline(request.grant, request.client, _now()))
            case _:
                raise BadRequestError(f"{request.kind!r} does not belong on a server's subject")
        return Ok(server=self._server_id, state=self.state)

    def _log_release(self, request: Cancel | Done) -> None:
        if self._log.is_detailed:
            what = "confirmed by its client" if isinstance(request, Done) else "cancelled by its client"
            for job_id in request.jobs:
                if (job := self.jobs.owned(job_id, request.client)) is not None:
                    self._log.step(what, job_id, attempt=job.attempt, client=request.client, state=job.state.value)

    def _refusal(self, message: Any, error: Exception) -> bytes:
        if plain_requests.is_plain(message.data):
            return plain_requests.refusal(error)
        return pack(to_failure(error, origin=self._server_id))

    # ---- instructions

    def start(self, job: Job, work: Work) -> None:
        """Run an admitted job whose input is whole."""
        job.state = JobState.RUNNING
        self._runner.start(work)

    def fail(self, job_id: str, failure: Failure) -> None:
        """End an admitted job."""
        self._end(job_id, failure)

    def tell_again(self, job: Job) -> None:
        """Send the outcome of a job that is done once more."""
        self._tell(job, job.outcome)

    def apply(self, instructions: Iterable[AddCredits | WithdrawCredits | SendGrant]) -> None:
        """Carry out what the slots say."""
        for instruction in instructions:
            match instruction:
                case AddCredits(count=count):
                    self._tasks.spawn(self._add_credits(count))
                case WithdrawCredits():
                    self._tasks.spawn(self._withdraw())
                case SendGrant(inbox=inbox, grant=grant):
                    message = Grant(grant=grant, server=self._server_id, ttl_s=self._settings.grant_ttl_s)
                    self._connection.send(inbox, pack(message))
        self._changed.set()

    def _obey(self, instructions: Iterable[Probe | Expire | Lose | LetGo | Forget]) -> None:
        for instruction in instructions:
            match instruction:
                case Probe(client=client, inbox=inbox):
                    self._tasks.spawn(self._probe(client, inbox))
                case Forget(job=job_id):
                    self._stop(job_id)
                case Expire(job=job_id, reason=reason):
                    self.counts["orphaned"] += 1
                    self._log.trouble("lease expired, the job is cancelled", job_id, reason)
                    self._stop(job_id)
                    self._replace(job_id, self._failure(LeaseExpiredError(reason, origin=self._server_id)))
                case Lose(job=job_id, reason=reason):
                    self.counts["lost_results"] += 1
                    self._log.trouble("result dropped", job_id, reason, level=logging.ERROR)
                    self._replace(job_id, self._failure(ResultLostError(reason, origin=self._server_id)))
                case LetGo(job=job_id):
                    self.counts["unconfirmed_results"] += 1
                    self._log.trouble("outcome let go", job_id, "it was sent, never confirmed, and memory is short")

    def _stop(self, job_id: str) -> None:
        """Cancel a job. One whose input has not arrived yet runs nowhere: its slot is free at once."""
        if self._uploads.drop(job_id):
            self.apply(self.slots.release(job_id, _now()))
        self._runner.cancel(job_id)

    def _failure(self, error: Exception) -> Failure:
        return to_failure(error, origin=self._server_id)

    def _replace(self, job_id: str, failure: Failure) -> None:
        self.jobs.replace_outcome(job_id, failure, size_bytes=held_size_bytes(failure), now=_now())

    async def _add_credits(self, count: int) -> None:
        if self._connection.is_up:
            await self._credits.add(count)

    async def _withdraw(self) -> None:
        if self._withdrawing:
            return
        self._withdrawing = True
        try:
            await self._credits.withdraw()
        except Exception as error:  # noqa: BLE001 - logged; without credits_gone() no push would ever come in again
            self.notices.note("credits", "the queue group was not left in order", _now(), error=error)
        finally:
            self._withdrawing = False
        self.apply(self.slots.credits_gone(_now()))

    async def _probe(self, client: str, inbox: str) -> None:
        """Ask nobody in particular: only whether NATS knows a subscriber matters. A denial says nothing of it."""
        gone = False
        try:
            await self._connection.request(inbox, pack(Ok(server=self._server_id)), timeout_s=PROBE_TIMEOUT_S / 2)
        except NoServerError:
            # Between accounts the way to a client may have ended, and not the client.
            gone = _now() >= self._trust_503_from and not inbox.startswith(MAPPED_INBOX)
        except (TimeoutError, EnvbusError):
            pass
        self.jobs.probe_answered(client, gone=gone, now=_now())

    # ---- time and outages

    def _tick(self) -> None:
        if not self._connection.is_up:
            return
        self.apply(self.slots.tick(_now()))
        instructions = self.jobs.tick(_now())
        for instruction in instructions:
            if isinstance(instruction, Forget):
                self.counts["orphaned"] += 1
                self._log.trouble("job dropped", instruction.job, "its client is gone")
        self._obey(instructions)
        self.apply(self._pressure.weigh(_now()))
        self._log.tick()

    def _on_reconnected(self, outage_s: float) -> None:
        self._trust_503_from = _now() + return_after_s(outage_s)
        self.jobs.shift_clocks(outage_s)
        self.slots.credits_going()
        self._tasks.spawn(self._withdraw())


def _now() -> float:
    return time.monotonic()
