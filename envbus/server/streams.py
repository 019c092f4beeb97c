"""Sends what running jobs report to their clients, and again what was lost on the way. On the bus thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from envbus.bus.connection import Connection
from envbus.bus.messages import Check, Heard, Progress, Run, pack
from envbus.server.jobs import Job, Jobs, JobState
from envbus.server.progress import Chunk, ProgressBuffer
from envbus.settings import INLINE_BYTES

ENVELOPE_BYTES = 512
"""More than any envelope around a chunk takes."""
MAX_RESENT_BYTES = 8 * 2**20
"""Sent again in answer to one check; the rest with the next."""


class Streams:
    """The progress of one server's jobs.

    Args:
        heard: Called with a job, its attempt, and the bytes that its caller has taken.
        window_bytes: Of each job, sent and not yet taken by its caller.
    """

    def __init__(
        self,
        connection: Connection,
        jobs: Jobs,
        *,
        server_id: str,
        window_bytes: int,
        heard: Callable[[str, int, int], None],
        counts: Counter[str],
    ) -> None:
        self._connection = connection
        self._jobs = jobs
        self._server_id = server_id
        self._window_bytes = window_bytes
        self._heard = heard
        self._counts = counts

    def buffer_for(self, run: Run) -> ProgressBuffer | None:
        """Return where the progress of a job is kept, if its client wants it."""
        return ProgressBuffer(attempt=run.attempt, window_bytes=self._window_bytes) if run.progress else None

    def put(self, job_id: str, attempt: int, body: bytes) -> None:
        """A running job reports."""
        job = self._jobs.get(job_id)
        if job is None or job.state is JobState.DONE or job.progress is None or job.progress.attempt != attempt:
            return  # it was given up meanwhile
        chunk_bytes = max(1, min(INLINE_BYTES, self._connection.max_payload - ENVELOPE_BYTES))
        self._send(job, job.progress.put(body, chunk_bytes=chunk_bytes))

    def told(self, job: Job) -> int | None:
        """Its client is told the outcome now; returns how many progress messages go before that."""
        if job.progress is not None:
            job.progress.told()
        return job.progress_total

    def heard(self, word: Heard, reply: str) -> None:
        """A caller has taken something, or says where it listens: a reply subject may end with a connection."""
        if word.follow:
            self._jobs.follow(word.client, reply)
        self._taken(self._jobs.owned(word.job, word.client), word.attempt, word.seq)

    def checked(self, check: Check) -> None:
        """A client asks how its jobs are: send again what it lacks."""
        here = {job_id: (attempt, seq, received) for job_id, attempt, seq, received in check.progress or ()}
        left_bytes = MAX_RESENT_BYTES
        for job_id in check.jobs:
            job = self._jobs.owned(job_id, check.client)
            if job is None or job.progress is None:
                continue
            attempt, seq, received = here.get(job_id, (0, 0, 0))
            self._taken(job, attempt, seq)
            lost = job.progress.lost(received if attempt == job.progress.attempt else 0)
            left_bytes -= self._send(job, _within(lost, left_bytes))

    def _taken(self, job: Job | None, attempt: int, seq: int) -> None:
        if job is None or job.progress is None or job.progress.attempt != attempt:
            return
        freed_bytes, chunks = job.progress.heard(seq)
        self._send(job, chunks)
        if freed_bytes:
            self._heard(job.job, attempt, freed_bytes)

    def _send(self, job: Job, chunks: Iterable[Chunk]) -> int:
        assert job.progress is not None
        sent_bytes, inbox = 0, self._jobs.progress_inbox(job)
        for chunk in chunks:
            message = Progress(
                job=job.job,
                attempt=job.progress.attempt,
                server=self._server_id,
                seq=chunk.seq,
                more=chunk.more,
                ask=chunk.ask,
                body=chunk.body,
            )
            data = pack(message)
            self._connection.send(inbox, data)
            sent_bytes += len(data)
        self._counts["sent_bytes"] += sent_bytes
        return sent_bytes


def _within(chunks: list[Chunk], max_bytes: int) -> Iterable[Chunk]:
    """Return the first of them, so many bytes."""
    for chunk in chunks:
        max_bytes -= len(chunk.body)
        if max_bytes < 0:
            return
        yield chunk
