"""A client's side of the bus: sends jobs, follows them, collects results. Runs on the bus thread.

Decides through Dispatch and Attempts and carries out what they say. Every job
that is submitted ends exactly once: with a body, or with an error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from envbus.bus.bodies import BodyWorkers
from envbus.bus.connection import Connection, Listener
from envbus.bus.dialer import return_after_s
from envbus.bus.failures import from_failure
from envbus.bus.inbox import is_closed_notice, is_no_responders
from envbus.bus.messages import (
    Accepted,
    Announce,
    Busy,
    Cancel,
    Done,
    Failure,
    Grant,
    Ok,
    Parts,
    Pass,
    Progress,
    Result,
    Run,
    Status,
    Wait,
    WireMessage,
    pack,
    parse,
)
from envbus.bus.subjects import Subjects
from envbus.bus.tasks import TaskSet
from envbus.bus.transfer import Packed, unpacked_bytes
from envbus.client.absence import Absence
from envbus.client.attempts import Attempts, CancelOn, Collect, Lost, Resend
from envbus.client.cancels import Cancels
from envbus.client.checks import Checks
from envbus.client.client_job import ClientJob
from envbus.client.clocks import Clocks
from envbus.client.dispatch import Dispatch, PassGrant, Push, SayWaiting, UseGrant
from envbus.client.following import Following
from envbus.client.job_lists import in_messages
from envbus.client.large_bodies import LargeBodies
from envbus.client.late import LateReplies
from envbus.client.numbers import ClientNumbers
from envbus.client.patience import Patience
from envbus.client.progress import Report
from envbus.client.receipts import Receipts
from envbus.client.suspects import Suspects
from envbus.client.transfers import Transfers
from envbus.errors import (
    BusClosedError,
    BusPermissionError,
    DecodeError,
    EnvbusError,
    LateRequestError,
    ServerLostError,
    ServerStoppingError,
)
from envbus.job_log import JobLog
from envbus.settings import ClientSettings

log = logging.getLogger("envbus.client")

TICK_S = 0.1
_MAX_TEXT = 200


class Session:
    """The jobs of one client.

    Args:
        client_id: Names the client to the servers.
        workers: Put large results together.
        priority: Place in their waiting lines; higher goes first.
        fingerprint: Only servers with this one may run its jobs.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        *,
        client_id: str,
        settings: ClientSettings,
        workers: BodyWorkers,
        priority: int = 0,
        fingerprint: str | None = None,
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._client_id = client_id
        self._settings = settings
        self._priority = priority
        self._fingerprint = fingerprint
        self._log = JobLog(log, client=client_id, env=subjects.env)
        self.counts: Counter[str] = Counter()
        self.numbers = ClientNumbers(self.counts, connection.stats)
        self._tasks = TaskSet("the client")
        self._jobs: dict[str, ClientJob] = {}
        self._dispatch = Dispatch(
            max_unaccepted=settings.max_unaccepted,
            accept_timeout_s=settings.accept_timeout_s,
            wait_repeat_s=settings.wait_repeat_s,
        )
        self._attempts = Attempts(max_attempts=settings.max_attempts, stall_timeout_s=settings.stall_timeout_s)
        self._suspects = Suspects()
        self._clocks = Clocks(give_up_s=settings.start_window_s)
        self._cancels = Cancels(connection, subjects, client_id=client_id, is_unplaced=self._attempts.is_unplaced)
        self._late = LateReplies(
            connection, self._stop_late, keep_s=settings.start_window_s, counts=self.counts, log=self._log
        )
        self._absence = Absence(connection, subjects, settings=settings, fingerprint=fingerprint)
        self._patience = Patience(
            connection,
            subjects,
            dispatch=self._dispatch,
            absence=self._absence,
            tasks=self._tasks,
            end=self._end_waiting,
        )
        transfers = Transfers(connection, subjects, client_id=client_id, settings=settings, workers=workers)
        self._large = LargeBodies(connection, transfers, self, self._tasks, log=self._log)
        self._checks = Checks(
            connection,
            subjects,
            client_id=client_id,
            interval_s=settings.check_interval_s,
            holders=self._attempts.holders,
            suspects=self._suspects.servers,
            follow=lambda server, jobs: self._following.follow(server, jobs),
            progress=lambda job_id, server: self._following.here(job_id, server),
            on_status=self._on_status,
            on_nobody=self.nobody_answers,
            on_ended=self._suspects.ended,
            tasks=self._tasks,
            notices=self._log.notices,
        )
        self._following = Following(
            self,
            self._jobs,
            client_id=client_id,
            is_held_by=self._attempts.is_held_by,
            tell=self._tell,
            hurry=self._checks.hurry_with,
        )
        self._receipts = Receipts(connection, subjects, client_id=client_id, tasks=self._tasks)
        self._closed = False
        self._listener = Listener(self._on_disconnected, self._on_reconnected)
        connection.listen(self._listener)
        self._line_token = connection.inbox.route(self._on_line_reply)
        self._aside_token = connection.inbox.route(self._on_aside)
        self._tasks.spawn(self._checks.open())
        self._tasks.repeat(self._tick, every_s=TICK_S)

    # ---- the caller's side

    def submit(self, job: ClientJob) -> None:
        """Take on a job."""
        if self._closed:
            job.ending(BusClosedError("the client is closed"))
            return
        self._jobs[job.job] = job
        job.submitted_at = _now()
        self.counts["jobs"] += 1
        self._log.step("submitted", job.job, rollouts=job.size, bytes=len(job.body.data))
        self._attempts.start(job.job)
        self._connection.inbox.route(self._on_job_reply(job.job), token=job.job)
        self._dispatch_all(self._dispatch.submit(job.job, _now()))

    def taken(self, job_id: str, report: Report) -> None:
        """The caller has taken a report of a job's progress."""
        self._following.taken(job_id, report)

    def leave(self, job_id: str) -> None:
        """The caller has the outcome, or waits no more: then the job is given up, and its server is told."""
        self._large.taken(job_id)
        if job_id in self._jobs:
            self._log_end("given up by its caller", self._jobs[job_id])
            self._forget(job_id, served_by=None)

    async def close(self) -> None:
        """End every job with BusClosedError and tell the servers, with a bound on the wait for that."""
        if self._closed:
            return
        self._closed = True
        holders = self._attempts.holders()
        for job_id in list(self._jobs):
            self.end(job_id, BusClosedError("the client was closed; the outcome of this call is unknown"), None)
        if self._connection.is_up:
            cancels = [self._ask_all(server, jobs) for server, jobs in holders.items()]
            receipts = asyncio.wait_for(self._receipts.close(), self._settings.close_timeout_s)
            await asyncio.gather(*cancels, receipts, self._wait_late(), return_exceptions=True)
        self._connection.unlisten(self._listener)
        self._late.clear()
        self._cancels.close()
        self._connection.inbox.unroute(self._line_token)
        self._connection.inbox.unroute(self._aside_token)
        await self._tasks.close()
        await self._checks.close()
        self._log.close()
        if (trouble := self.numbers.trouble()) is not None:
            who = {"client": self._client_id, "env": self._subjects.env}
            log.info("client %s: %s", self._client_id[:8], trouble, extra=who)

    async def _ask_all(self, server: str, jobs: tuple[str, ...]) -> None:
        limit_s = self._settings.close_timeout_s
        async with asyncio.timeout(limit_s):
            for some in in_messages(jobs, self._connection.max_payload):
                message = pack(Cancel(client=self._client_id, jobs=some))
                await self._connection.request(self._subjects.server(server), message, timeout_s=limit_s)

    async def _wait_late(self) -> None:
        """Wait for the accepts that are still under way: their jobs are cancelled when they come."""
        await asyncio.wait_for(self._late.answered(), self._settings.close_timeout_s)

    def _stop_late(self, server: str, job_id: str) -> None:
        self._cancels.say(server, [job_id], _now())

    # ---- ends

    def end(self, job_id: str, outcome: Packed | EnvbusError, served_by: str | None) -> None:
        """End a job and tell its caller, once all progress before that is here. Harmless for a job that has ended."""
        job = self._jobs.get(job_id)
        if job is None:
            self._large.taken(job_id)
            return
        if served_by is not None and self._following.holds_back(job, outcome, served_by):
            return
        state = type(outcome).__name__ if isinstance(outcome, EnvbusError) else "result"
        self._log_end("delivered", job, server=served_by, state=state)
        try:
            self._forget(job_id, served_by)
        finally:
            job.ending(outcome)

    def _log_end(self, what: str, job: ClientJob, **facts: Any) -> None:
        seconds = round(_now() - job.submitted_at, 3)
        self._log.step(what, job.job, attempt=self._attempts.attempt(job.job), seconds=seconds, **facts)

    def _forget(self, job_id: str, served_by: str | None) -> None:
        job = self._jobs.pop(job_id)
        if served_by is not None:
            self._receipts.add(served_by, job_id)
        self._connection.inbox.unroute(job_id)
        self._large.over(job_id)
        if job.unanswered > 0:
            self._late.expect(job_id, job.unanswered)
        is_again = self._attempts.attempt(job_id) > 1
        cancels = self._attempts.finish(job_id, served_by)
        if served_by is not None and (is_again or cancels or job.unanswered > 0):
            self._late.remember(job_id)
        self._follow_all(cancels)
        self._dispatch_all(self._dispatch.remove(job_id, _now()))

    # ---- sending

    def _dispatch_all(self, instructions: Iterable[Push | UseGrant | PassGrant | SayWaiting]) -> None:
        for instruction in instructions:
            match instruction:
                case Push(job=job_id):
                    self._send_job(job_id, server=None, grant=None)
                case UseGrant(job=job_id, server=server, grant=grant):
                    self._send_job(job_id, server=server, grant=grant)
                case PassGrant(server=server, grant=grant):
                    self._tell(server, Pass(client=self._client_id, grant=grant))
                case SayWaiting(jobs=count):
                    wait = Wait(client=self._client_id, n=count, priority=self._priority, fingerprint=self._fingerprint)
                    self._absence.asked(waiting=count, now=_now())
                    self._send(self._subjects.wait, wait, self._line_token)

    def _send_job(self, job_id: str, *, server: str | None, grant: str | None) -> None:
        job = self._jobs[job_id]
        job.sent_to = server
        job.unanswered += 1
        if server is not None:
            self._cancels.withdraw(server, job_id)
        parts = self._large.upload_parts(job)
        start_by = time.time() + self._settings.start_window_s
        run = Run(
            job=job_id,
            attempt=self._attempts.attempt(job_id),
            client=self._client_id,
            call=job.call,
            size=job.size,
            start_by=start_by if job.deadline is None else min(start_by, job.deadline),
            fingerprint=self._fingerprint,
            grant=grant,
            encoding=job.body.encoding if parts is None else "",
            body=job.body.data if parts is None else None,
            upload=parts,
            progress=True if job.reporting is not None else None,
        )
        subject = self._subjects.rollout if server is None else self._subjects.server(server)
        self._log.step("sent", job_id, attempt=run.attempt, server=server)
        self._send(subject, run, job_id)

    def _tell(self, server: str, message: WireMessage) -> None:
        self._send(self._subjects.server(server), message, self._aside_token)

    def _send(self, subject: str, message: WireMessage, token: str) -> None:
        self._connection.send(subject, pack(message), reply=self._connection.inbox.reply_subject(token))

    # ---- replies to a job

    def _on_job_reply(self, job_id: str) -> Callable[[Any], None]:
        def handle(message: Any) -> None:
            if is_closed_notice(message):
                self.end(job_id, BusClosedError("the connection was closed; the call's outcome is unknown"), None)
            elif is_no_responders(message):
                self._on_nobody(job_id)
            else:
                self._on_answer(job_id, message.data)

        return handle

    def _on_nobody(self, job_id: str) -> None:
        job = self._jobs[job_id]
        job.unanswered -= 1
        server = job.sent_to
        self._log.step("refused", job_id, reason="nobody is there, or has room", server=server)
        if server is not None:
            self.nobody_answers(server)
        self._dispatch_all(self._dispatch.refused(job_id, _now()))

    def _on_answer(self, job_id: str, data: bytes) -> None:
        try:
            answer = parse(data)
            if getattr(answer, "job", None) not in (job_id, None):
                raise DecodeError("it is about another job")
        except EnvbusError as error:
            self.counts["bad_messages"] += 1
            self._log.trouble("a reply was dropped", job_id, str(error)[:_MAX_TEXT])
            return
        match answer:
            case Accepted(server=server, node=node):
                self._jobs[job_id].unanswered -= 1
                self._suspects.heard(server, node, _now())
                self._log.step("accepted", job_id, attempt=answer.attempt, server=server)
                self._on_accepted(job_id, server)
                if (job := self._jobs.get(job_id)) is not None:
                    self._large.upload(job, server)
            case Busy(server=server, reason=reason):
                self._jobs[job_id].unanswered -= 1
                self._log.step("refused", job_id, reason=reason, server=server)
                self._dispatch_all(self._dispatch.refused(job_id, _now()))
            case Progress():
                self._following.came(job_id, answer)
            case Result(server=server, encoding=encoding, body=body, progress=total):
                self._jobs[job_id].progress.expect(server, total)
                if total:
                    self._on_accepted(job_id, server)  # else nobody would ask it for progress that is missing
                self.end(job_id, Packed(body, encoding, unpacked_bytes(body, encoding)), server)
            case Announce(server=server, parts=parts, progress=total):
                self._jobs[job_id].progress.expect(server, total)
                self._on_accepted(job_id, server)
                self._collect(job_id, server, parts)
            case Failure():
                if not self._attempts.is_held_by(job_id, answer.sender or ""):
                    self._jobs[job_id].unanswered -= 1
                self._on_failure(job_id, answer)

    def _on_aside(self, message: Any) -> None:
        """Progress of all jobs, once their servers were told to send it here; what else comes needs no heed."""
        if is_closed_notice(message) or is_no_responders(message):
            return
        try:
            answer = parse(message.data)
        except EnvbusError:
            self.counts["bad_messages"] += 1
            return
        if isinstance(answer, Progress):
            self._following.came(answer.job, answer)

    def _on_accepted(self, job_id: str, server: str) -> None:
        self._cancels.withdraw(server, job_id)
        self._dispatch_all(self._dispatch.accepted(job_id, _now()))
        self._follow_all(self._attempts.accepted(job_id, server, _now()))

    def _on_failure(self, job_id: str, failure: Failure) -> None:
        server, error = failure.sender or "", from_failure(failure)
        if server and isinstance(error, ServerStoppingError):
            self._tell(server, Done(client=self._client_id, jobs=[job_id]))
            self._follow_all(self._attempts.outcome_lost(job_id, server, str(error)))
        elif not self._attempts.is_awaited_from(job_id, server):
            self.counts["late_failures"] += 1
            why = f"server {server[:8]} does not have the job any more: {str(error)[:_MAX_TEXT]}"
            self._log.trouble("a late failure was dropped", job_id, why, server=server)
        elif not (isinstance(error, LateRequestError) and self._goes_elsewhere(job_id, server)):
            self._jobs[job_id].progress.expect(server, failure.progress)
            self.end(job_id, error, server or None)

    def _goes_elsewhere(self, job_id: str, server: str) -> bool:
        """Refused as late: send it to a server with another clock, unless its time is really over."""
        job, now = self._jobs[job_id], _now()
        job.late_since = job.late_since or now
        if (job.deadline is not None and time.time() >= job.deadline) or self._clocks.is_hopeless(job.late_since, now):
            return False
        if self._clocks.refused(server, now):
            why = f"server {server[:8]} refuses jobs: its clock and this host's differ"
            self._log.trouble("refused as late", job_id, why, server=server)
        self._dispatch_all(self._dispatch.refused(job_id, now))
        return True

    def _collect(self, job_id: str, server: str, parts: Parts | None) -> None:
        job = self._jobs.get(job_id)
        if job is not None and not self._following.is_waiting_for(job, server):
            self._large.collect(job, server, parts)

    # ---- following accepted jobs

    def _follow_all(self, instructions: Iterable[Resend | Collect | CancelOn | Lost]) -> None:
        for instruction in instructions:
            match instruction:
                case Resend(job=job_id, reason=reason):
                    self.counts["resent"] += 1
                    self._log.trouble("sent again", job_id, reason, attempt=self._attempts.attempt(job_id))
                    self._forget_attempt(self._jobs[job_id])
                    self._dispatch_all(self._dispatch.resend(job_id, _now()))
                case Collect(job=job_id, server=server):
                    self._collect(job_id, server, None)
                case CancelOn(server=server, jobs=jobs):
                    for job_id in jobs:
                        self._log.step("cancelled there", job_id, server=server)
                    self._cancels.say(server, jobs, _now())
                case Lost(job=job_id, attempts=attempts, reason=reason):
                    text = f"env {self._subjects.env}: lost {attempts} servers under one job: {reason}"
                    self.counts["lost"] += 1
                    self._log.trouble("given up", job_id, reason, attempt=attempts)
                    self.end(job_id, ServerLostError(text), None)

    def _forget_attempt(self, job: ClientJob) -> None:
        if job.held is not None:
            self._large.taken(job.job)
        job.forget_attempt()

    def is_awaited_from(self, job_id: str, server: str) -> bool:
        """Whether this server's word on the job still counts."""
        return self._attempts.is_awaited_from(job_id, server)

    def attempt_failed(self, job_id: str, server: str, reason: str) -> None:
        """A server cannot finish the job: it is told to stop, and the job is sent again."""
        self._cancels.say(server, [job_id], _now())
        self._follow_all(self._attempts.outcome_lost(job_id, server, reason))

    def nobody_answers(self, server: str) -> None:
        """A 503: its jobs are sent again once it is certain that it is gone, and cancelled there if it comes back."""
        if self._suspects.nobody(server, own_node=self._connection.node, now=_now()):
            self._cancels.owe(server, self._attempts.holders().get(server, ()), _now())
            self._follow_all(self._attempts.gone(server))

    def _on_status(self, server: str, status: Status) -> None:
        self._suspects.heard(server, status.node, _now())
        self._following.totals(server, status)
        self._follow_all(self._attempts.status(server, done=status.done, unknown=status.unknown, now=_now()))
        for failure in status.failed:
            if failure.job is not None:
                self._on_failure(failure.job, failure)

    # ---- the waiting line

    def _on_line_reply(self, message: Any) -> None:
        if is_closed_notice(message):
            return
        if is_no_responders(message):
            self._absence.nobody(_now())
            return
        try:
            answer = parse(message.data)
        except EnvbusError as error:
            self.counts["bad_messages"] += 1
            text = f"a reply from the waiting line was dropped: {str(error)[:_MAX_TEXT]}"
            self._log.notices.note("line reply", text, _now())
            return
        match answer:
            case Grant(server=server, grant=grant) if self._clocks.is_doubted(server, _now()):
                self._tell(server, Pass(client=self._client_id, grant=grant))
            case Grant(server=server, grant=grant):
                self._dispatch_all(self._dispatch.granted(server, grant, _now()))
            case Ok(state=state):
                self._absence.heard(state, _now())

    # ---- time and outages

    def _tick(self) -> None:
        if not self._connection.is_up:
            return
        now = _now()
        self._note_unaccepted(now)
        self._dispatch_all(self._dispatch.tick(now))
        self._follow_all(self._attempts.tick(now))
        self._suspects.keep_only(self._attempts.servers())
        self._following.tick()
        self._checks.tick(now)
        self._cancels.tick(now)
        self._patience.tick(now)
        self._end_denied()
        self._log.tick()

    def _note_unaccepted(self, now: float) -> None:
        for job_id in self._dispatch.overdue(now):
            self.counts["unaccepted"] += 1
            job, limit_s = self._jobs[job_id], self._settings.accept_timeout_s
            why = f"no server accepted it in {limit_s:g} s"
            self._log.trouble("a send got no answer", job_id, why, server=job.sent_to)

    def _end_denied(self) -> None:
        """Jobs that NATS does not let this user send, or ask about, would be waited for for ever."""
        if not self._connection.may_not_send:
            return
        subjects = self._subjects
        to_any = self._denied(subjects.rollout, subjects.wait)
        for job_id in self._dispatch.pending():
            server = self._jobs[job_id].sent_to
            self._end_if(to_any if server is None else self._denied(subjects.server(server)), job_id)
        for server, jobs in self._attempts.holders().items():
            denied = self._denied(subjects.server(server))
            for job_id in jobs:
                self._end_if(denied, job_id)

    def _denied(self, *subjects: str) -> str:
        return "; ".join(text for subject in subjects if (text := self._connection.denied("publish", subject)))

    def _end_if(self, denied: str, job_id: str) -> None:
        if denied:
            self.end(job_id, BusPermissionError(denied), None)

    def _end_waiting(self, job_id: str, error: EnvbusError) -> None:
        history = "; ".join(self._attempts.history(job_id))
        self.end(job_id, ServerLostError(f"{history}; then: {error}") if history else error, None)

    def _on_disconnected(self) -> None:
        self._dispatch.disconnected()

    def _on_reconnected(self, outage_s: float) -> None:
        self._attempts.shift_clocks(outage_s)
        self._absence.reset()
        self._suspects.reconnected(deaf_until=_now() + return_after_s(outage_s))
        self._checks.hurry()
        self._dispatch_all(self._dispatch.reconnected(_now()))


def _now() -> float:
    return time.monotonic()
