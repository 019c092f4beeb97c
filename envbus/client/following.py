"""Follows the progress of a client's jobs: hands on what is new, and says what was taken.

Holds an outcome back until all progress that goes before it is here. On the bus loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from envbus.bus.messages import Heard, Progress, Status, WireMessage
from envbus.bus.transfer import Packed
from envbus.client.client_job import ClientJob
from envbus.client.progress import EndlessReportError, Message, Report
from envbus.errors import EnvbusError

MAX_CHECKS = 30
"""Answers of a server that has an outcome, but sends nothing of the progress that is missing."""


class ProgressOwner(Protocol):
    """Who follows the jobs."""

    def end(self, job_id: str, outcome: Packed | EnvbusError, served_by: str | None) -> None:
        """The job is over."""

    def attempt_failed(self, job_id: str, server: str, reason: str) -> None:
        """The server cannot finish the job."""


class Following:
    """The progress of one client's jobs.

    Args:
        jobs: Those that have not ended.
        is_held_by: Whether a server accepted a job and may still run it.
        tell: Sends a message to a server.
        hurry: Has a server checked soon.
    """

    def __init__(
        self,
        owner: ProgressOwner,
        jobs: Mapping[str, ClientJob],
        *,
        client_id: str,
        is_held_by: Callable[[str, str], bool],
        tell: Callable[[str, WireMessage], None],
        hurry: Callable[[str], None],
    ) -> None:
        self._owner = owner
        self._jobs = jobs
        self._client_id = client_id
        self._is_held_by = is_held_by
        self._tell = tell
        self._hurry = hurry
        self._unsaid: dict[tuple[str, str], None] = {}

    def came(self, job_id: str, progress: Progress) -> None:
        """A server sends progress of a job."""
        job, server = self._jobs.get(job_id), progress.server
        if job is None or job.reporting is None or not self._is_held_by(job_id, server):
            return
        had_gap, before = job.progress.has_gap(server), job.progress.here(server)
        message = Message(progress.attempt, progress.seq, progress.body, progress.more, progress.ask)
        try:
            reports = job.progress.put(server, message)
        except EndlessReportError:
            self._owner.attempt_failed(job_id, server, f"server {server[:8]} sent a progress report without an end")
            return
        if job.progress.here(server) != before:
            job.held_checks = 0
        for report in reports:
            job.reporting(report)
        self._say_if_due(job, server)
        if job.progress.has_gap(server) and not had_gap:
            self._hurry(server)
        self._end_if_whole(job, server)

    def taken(self, job_id: str, report: Report) -> None:
        """The caller has taken a report."""
        if (job := self._jobs.get(job_id)) is not None:
            job.progress.taken(report)
            self._say_if_due(job, report.server)

    def here(self, job_id: str, server: str) -> tuple[int, int, int] | None:
        """Return how much of a job's progress is here from a server; see Incoming."""
        job = self._jobs.get(job_id)
        return None if job is None or job.reporting is None else job.progress.here(server)

    def follow(self, server: str, jobs: Iterable[str]) -> None:
        """Have a server send progress to where it is heard now: its leave to reply may have ended with a connection."""
        followed = (job for job_id in jobs if (job := self._jobs.get(job_id)) is not None and job.reporting is not None)
        if (job := next(followed, None)) is not None:
            attempt, seq, _ = job.progress.here(server) or (0, 0, 0)
            self._tell(server, Heard(client=self._client_id, job=job.job, attempt=attempt, seq=seq, follow=True))

    def totals(self, server: str, status: Status) -> None:
        """A server tells how much progress goes before the outcomes that it has."""
        for job_id, total in status.progress or ():
            if job_id in self._jobs:
                self._jobs[job_id].progress.expect(server, total)

    def holds_back(self, job: ClientJob, outcome: Packed | EnvbusError, served_by: str) -> bool:
        """Keep an outcome until its progress is here; False: it is."""
        if job.reporting is None or job.progress.is_whole(served_by):
            return False
        if not self.is_waiting_for(job, served_by):
            job.held, job.held_checks = (outcome, served_by), 0
            job.collecting_from = None  # another server may have an outcome, too
            self._hurry(served_by)
        return True

    def is_waiting_for(self, job: ClientJob, server: str) -> bool:
        """Whether this server's outcome is here and waits for its progress.

        Each time that is asked is counted, but not while it may be the caller that is slow.
        """
        if job.held is None or job.held[1] != server:
            return False
        if not job.progress.waits_for_caller(server):
            job.held_checks += 1
        if job.held_checks > MAX_CHECKS:
            reason = f"server {server[:8]} did not send progress that is missing"
            self._owner.attempt_failed(job.job, server, reason)
        return True

    def tick(self) -> None:
        """Say what was taken since the last word, whether asked or not: an environment may wait for a little room."""
        unsaid, self._unsaid = self._unsaid, {}
        for job_id, server in unsaid:
            if (job := self._jobs.get(job_id)) is not None:
                self._say(job, server)

    def _say_if_due(self, job: ClientJob, server: str) -> None:
        if job.progress.is_word_due(server):
            self._say(job, server)
        else:
            self._unsaid[job.job, server] = None

    def _say(self, job: ClientJob, server: str) -> None:
        if (word := job.progress.word(server)) is not None:
            attempt, seq = word
            self._tell(server, Heard(client=self._client_id, job=job.job, attempt=attempt, seq=seq, follow=True))

    def _end_if_whole(self, job: ClientJob, server: str) -> None:
        if job.held is not None and job.held[1] == server and job.progress.is_whole(server):
            self._owner.end(job.job, job.held[0], server)
