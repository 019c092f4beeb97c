"""The jobs of one server: their states, the results held for collection, and the leases of their clients.

Pure: events and a clock value in, instructions out. A job is receiving (its
input comes in parts), running, or done (its outcome is held until the client
says so). A job whose client is gone is cancelled; a held outcome leaves by
done, by its client's death, by age, or as Holdings says while memory is short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from envbus.server.holdings import Holdings
from envbus.server.progress import ProgressBuffer

PASSED_OVER_CHECKS = 30
"""A client asks about all its jobs here every second: one that so many checks passed over is none of its own."""


class JobState(StrEnum):
    """Where a job is in its life on this server."""

    RECEIVING = "receiving"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class Job:
    """One job on this server.

    Attributes:
        client: Its client's id; for a plain request the reply inbox stands for the client.
        outcome: What is held for collection: opaque here.
        plain: A request without the job protocol: one reply, nothing held.
    """

    job: str
    client: str
    attempt: int
    size: int
    reply: str
    created_at: float
    plain: bool = False
    heard_at: float = 0.0
    """When its client last asked about it."""
    check: int = 0
    """Which of its client's checks that was."""
    fed_at: float = 0.0
    """When a part of its input last came."""
    state: JobState = JobState.RECEIVING
    outcome: Any = None
    progress: ProgressBuffer | None = None
    """If its client wants it."""

    @property
    def progress_attempt(self) -> int | None:
        """The attempt that its progress is of, if its client wants it."""
        return None if self.progress is None else self.progress.attempt

    @property
    def progress_total(self) -> int | None:
        """How many progress messages there are, if its client wants them."""
        return None if self.progress is None else self.progress.last


@dataclass(slots=True)
class Lease:
    """What is known of a client that has jobs here."""

    inbox: str
    heard_at: float
    progress_inbox: str = ""
    """Where progress of its jobs goes; empty: each job's own reply subject."""
    gone_since: float | None = None
    probed_at: float = 0.0
    checks: int = 0
    """How often it asked how its jobs here are."""
    jobs: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask NATS whether the client's inbox still has a subscriber."""

    client: str
    inbox: str


@dataclass(frozen=True, slots=True)
class Expire:
    """The client is gone: cancel the job if it runs and hold the reason as its outcome."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lose:
    """Drop the held result and keep a failure that says so in its place."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Memory was short: the job is out of the table, as its client was sent the outcome and asks no more."""

    job: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The job is out of the table; stop it if it runs."""

    job: str


Instruction = Probe | Expire | Lose | LetGo | Forget


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """When a silent client loses its jobs, and how long results are held. All in seconds or bytes."""

    probe_after_s: float
    orphan_grace_s: float
    orphan_timeout_s: float
    hold_results_s: float
    hold_results_bytes: int


class Jobs:
    """The table of jobs."""

    def __init__(self, limits: LeaseLimits) -> None:
        self._limits = limits
        self._jobs: dict[str, Job] = {}
        self._unfinished: dict[str, Job] = {}
        self._leases: dict[str, Lease] = {}
        self._held = Holdings(
            max_bytes=limits.hold_results_bytes, hold_s=limits.hold_results_s, quiet_s=limits.orphan_grace_s
        )

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def held_count(self) -> int:
        """Outcomes that wait to be collected."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """What they take."""
        return self._held.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether the memory for results is used up: no more work until some are collected."""
        return self._held.is_full

    @property
    def heavy_clients(self) -> frozenset[str]:
        """Clients that use half of that memory: no more work from these."""
        return self._held.heavy_clients

    def get(self, job_id: str) -> Job | None:
        """Return a job, or None if it is not (or no longer) here."""
        return self._jobs.get(job_id)

    def owned(self, job_id: str, client: str) -> Job | None:
        """Return a job if it is here and is this client's."""
        job = self._jobs.get(job_id)
        return job if job is not None and job.client == client else None

    def checked(self, client: str) -> None:
        """A client asks how jobs of its own are; each is then mentioned()."""
        if client in self._leases:
            self._leases[client].checks += 1

    def mentioned(self, job_id: str, client: str, now: float) -> Job | None:
        """Its client asks about a job: return it if it is here and that client's."""
        job = self.owned(job_id, client)
        if job is not None:
            job.heard_at, job.check = now, self._leases[client].checks
            self._held.asked(job_id, now)
        return job

    def sent(self, job_id: str, now: float) -> None:
        """The outcome of a job that is done went to its client on one message."""
        self._held.sent(job_id, now)

    def part_sent(self, job_id: str, index: int, *, of: int, now: float) -> None:
        """One part of a held result went to its client."""
        self._held.part_sent(job_id, index, of=of, now=now)

    def unfinished(self) -> list[Job]:
        """Jobs without an outcome."""
        return list(self._unfinished.values())

    def oldest_age_s(self, now: float) -> float:
        """Seconds since the oldest unfinished job came."""
        return max((now - job.created_at for job in self._unfinished.values()), default=0.0)

    def add(self, job: Job, now: float) -> None:
        """Take in a job that was admitted."""
        lease = self._lease(job.client, job.reply, now)
        lease.jobs.add(job.job)
        job.heard_at, job.check, job.fed_at = now, lease.checks, now
        self._jobs[job.job] = self._unfinished[job.job] = job

    def heard(self, client: str, inbox: str, now: float) -> None:
        """A client with jobs here sent something."""
        if client in self._leases:
            self._lease(client, inbox, now)

    def follow(self, client: str, inbox: str) -> None:
        """A client with jobs here says where it hears their progress from now on."""
        if client in self._leases:
            self._leases[client].progress_inbox = inbox

    def progress_inbox(self, job: Job) -> str:
        """Where progress of a job goes."""
        return self._leases[job.client].progress_inbox or job.reply

    def finish(self, job_id: str, outcome: Any, *, size_bytes: int, now: float, is_failure: bool = False) -> Job | None:
        """A job ended. Returns the job if somebody still wants the outcome."""
        job = self._unfinished.get(job_id)
        if job is None:
            return None
        if job.plain:
            self._remove(job)
        else:
            self._hold(job, outcome, size_bytes=size_bytes, is_failure=is_failure, now=now)
        return job

    def replace_outcome(self, job_id: str, failure: Any, *, size_bytes: int, now: float) -> None:
        """Hold a failure in place of what a job held or was going to."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._hold(job, failure, size_bytes=size_bytes, is_failure=True, now=now)

    def release(self, job_ids: Iterable[str], client: str) -> list[Instruction]:
        """The client wants nothing more of these jobs: results arrived, or it cancels."""
        forgotten: list[Instruction] = []
        for job_id in job_ids:
            job = self.owned(job_id, client)
            if job is not None:
                self._remove(job)
                forgotten.append(Forget(job_id))
        return forgotten

    def probe_answered(self, client: str, *, gone: bool, now: float) -> None:
        """Whether a client's inbox still had a subscriber."""
        lease = self._leases.get(client)
        if lease is None:
            return
        if not gone:
            lease.gone_since = None
        elif lease.gone_since is None:
            lease.gone_since = now

    def shift_clocks(self, outage_s: float) -> None:
        """This server was cut off: for that long nobody could have been heard."""
        for lease in self._leases.values():
            lease.heard_at += outage_s
            lease.progress_inbox = ""  # what may be answered to there has ended with the connection
            if lease.gone_since is not None:
                lease.gone_since += outage_s
        for job in self._jobs.values():
            job.heard_at += outage_s
            job.fed_at += outage_s
        self._held.shift_clocks(outage_s)

    def tick(self, now: float) -> list[Instruction]:
        """What time alone brings about."""
        instructions: list[Instruction] = []
        for client, lease in list(self._leases.items()):
            # A plain request's one reply is its result: whether anybody still waits for it cannot be asked.
            if not self._is_plain(lease):
                instructions += self._tick_lease(client, lease, now)
        return [*instructions, *self._tick_held(now)]

    def _tick_held(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for job_id in self._held.let_go(now):  # first: what was sent is not lost, however old
            self._remove(self._jobs[job_id])
            instructions.append(LetGo(job_id))
        for job_id, is_failure in self._held.overdue(now):
            if is_failure:
                self._remove(self._jobs[job_id])
            else:
                instructions.append(Lose(job_id, f"not collected within {self._limits.hold_results_s:g} s"))
        return instructions

    def _tick_lease(self, client: str, lease: Lease, now: float) -> list[Instruction]:
        limits = self._limits
        if lease.gone_since is not None and now - lease.gone_since >= limits.orphan_grace_s:
            return self._forget_client(client)
        if expired := self._expired(lease, now):
            return expired
        if now - lease.heard_at < limits.probe_after_s:
            return []
        if now - lease.probed_at >= min(limits.probe_after_s, limits.orphan_grace_s / 2):
            lease.probed_at = now
            return [Probe(client, lease.inbox)]
        return []

    def _expired(self, lease: Lease, now: float) -> list[Instruction]:
        jobs = (self._unfinished[job_id] for job_id in sorted(lease.jobs & self._unfinished.keys()))
        last_call, last_check = now - self._limits.orphan_timeout_s, lease.checks - PASSED_OVER_CHECKS
        expired: list[Instruction] = []
        for job in jobs:
            # A client that is silent, or that asks only about others, does not know of this job.
            if job.heard_at <= last_call or job.check <= last_check:
                reason = f"its client has not asked about it for {now - job.heard_at:.0f} s"
                expired.append(Expire(job.job, reason))
            elif job.state is JobState.RECEIVING and job.fed_at <= last_call:
                expired.append(Expire(job.job, f"no part of its input came for {now - job.fed_at:.0f} s"))
        return expired

    def _is_plain(self, lease: Lease) -> bool:
        return any(self._jobs[job_id].plain for job_id in lease.jobs)

    def _forget_client(self, client: str) -> list[Instruction]:
        lease = self._leases[client]
        forgotten: list[Instruction] = []
        for job_id in sorted(lease.jobs):
            self._remove(self._jobs[job_id])
            forgotten.append(Forget(job_id))
        return forgotten

    def _lease(self, client: str, inbox: str, now: float) -> Lease:
        lease = self._leases.get(client)
        if lease is None:
            lease = self._leases[client] = Lease(inbox, now)
        lease.inbox, lease.heard_at, lease.gone_since = inbox or lease.inbox, now, None
        return lease

    def _hold(self, job: Job, outcome: Any, *, size_bytes: int, is_failure: bool, now: float) -> None:
        self._unfinished.pop(job.job, None)
        job.state, job.outcome = JobState.DONE, outcome
        if job.progress is not None:
            size_bytes += job.progress.size_bytes
        self._held.put(job.job, job.client, size_bytes=size_bytes, is_failure=is_failure, now=now)

    def _remove(self, job: Job) -> None:
        self._held.drop(job.job)
        self._unfinished.pop(job.job, None)
        job.outcome = None
        del self._jobs[job.job]
        lease = self._leases.get(job.client)
        if lease is not None:
            lease.jobs.discard(job.job)
            if not lease.jobs:
                del self._leases[job.client]
