"""What a server answers about its jobs: how they are, parts of their results, parts of their inputs taken in."""

from __future__ import annotations

from collections import Counter

from envbus.bus.messages import Check, Failure, Fetch, Part, PartReply, Status
from envbus.bus.transfer import Assembly
from envbus.errors import BadRequestError, ResultLostError
from envbus.server.jobs import Job, Jobs, JobState
from envbus.server.outcomes import HeldResult, tell_part
from envbus.server.uploads import Uploads

MAX_FAILURES_TOLD = 8
"""Failures in one answer, so that it fits on a message; the next one tells of the others."""


class Answers:
    """Answers clients from the tables of one server."""

    def __init__(self, jobs: Jobs, uploads: Uploads, *, server_id: str, counts: Counter[str]) -> None:
        self._jobs = jobs
        self._uploads = uploads
        self._server_id = server_id
        self._counts = counts

    def status(self, check: Check, now: float, *, node: str | None = None) -> Status:
        """Say how each of a client's jobs is; ``node`` is the NATS server that this server is connected to."""
        self._jobs.checked(check.client)
        status = Status(server=self._server_id, node=node, running=[], unknown=[], done=[], failed=[])
        totals: list[tuple[str, int]] = []
        for job_id in check.jobs:
            job = self._jobs.mentioned(job_id, check.client, now)
            if job is None:
                status.unknown.append(job_id)
            elif job.state is not JobState.DONE:
                status.running.append(job_id)
            elif isinstance(job.outcome, Failure):
                if len(status.failed) >= MAX_FAILURES_TOLD:
                    status.running.append(job_id)
                    continue
                told = {"job": job_id, "attempt": job.attempt, "server": self._server_id}
                status.failed.append(job.outcome.model_copy(update=told | {"progress": job.progress_total}))
            else:
                status.done.append(job_id)
                if job.progress_total:
                    totals.append((job_id, job.progress_total))
        return status.model_copy(update={"progress": totals}) if totals else status

    def part_of_result(self, fetch: Fetch, now: float) -> PartReply:
        """Return a part of a held result.

        Raises:
            ResultLostError: It is not held here.
            DecodeError: It has no such part.
        """
        job = self._jobs.owned(fetch.job, fetch.client)
        if job is None or not isinstance(job.outcome, HeldResult):
            raise ResultLostError(f"no result of job {fetch.job} is held here", origin=self._server_id)
        part = tell_part(job.outcome, job=fetch.job, index=fetch.index)
        self._jobs.part_sent(fetch.job, fetch.index, of=part.parts.parts, now=now)
        self._counts["sent_bytes"] += len(part.data)
        return part

    def take_part(self, part: Part, now: float) -> tuple[Job, Assembly] | None:
        """Take in a part of an input; returns the job and its input with the last one.

        Raises:
            BadRequestError: No such input is awaited, or the part is wrong.
        """
        job = self._jobs.mentioned(part.job, part.client, now)
        if job is None:
            raise BadRequestError(f"no input of job {part.job} is awaited here")
        job.fed_at = now
        self._counts["received_bytes"] += len(part.data)
        whole = self._uploads.put(part.job, part.index, part.data)
        return (job, whole) if whole is not None and job.state is JobState.RECEIVING else None
