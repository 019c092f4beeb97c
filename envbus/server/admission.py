"""Which jobs a server takes in, and what it says to those that it does not. On the bus thread.

A job comes through the queue group (a credit was open) or straight here (on a
grant); a plain request comes through the queue group without a job's envelope.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, Protocol

from envbus.bus.connection import Connection
from envbus.bus.failures import to_failure
from envbus.bus.messages import Accepted, Busy, Failure, Run, pack, parse_map, read_map
from envbus.bus.transfer import unpack_body, unpacked_bytes
from envbus.errors import BadRequestError, EnvbusError, LateRequestError
from envbus.job_log import JobLog
from envbus.server import plain_requests
from envbus.server.jobs import Job, Jobs, JobState
from envbus.server.runner import Work
from envbus.server.slots import Instruction, Slots
from envbus.server.streams import Streams
from envbus.server.uploads import Uploads

PART_OVERHEAD_BYTES = 128
"""What keeping one part of an input takes beside its bytes."""

BusyReason = Literal["full", "draining", "fingerprint"]


class AdmissionOwner(Protocol):
    """Who carries out what an admission brings about."""

    state: str

    def apply(self, instructions: Iterable[Instruction]) -> None:
        """Carry out what the slots say."""

    def start(self, job: Job, work: Work) -> None:
        """Run an admitted job whose input is whole."""

    def fail(self, job_id: str, failure: Failure) -> None:
        """End an admitted job."""

    def tell_again(self, job: Job) -> None:
        """Send the outcome of a job that is done once more."""


class Admission:
    """Takes jobs in for one server.

    Args:
        fingerprint: Of what is served; a pinned client with another is sent on.
        max_input_bytes: Of an input, decompressed.
    """

    def __init__(
        self,
        connection: Connection,
        owner: AdmissionOwner,
        *,
        slots: Slots,
        jobs: Jobs,
        uploads: Uploads,
        streams: Streams,
        counts: Counter[str],
        log: JobLog,
        server_id: str,
        fingerprint: str,
        max_input_bytes: int,
    ) -> None:
        self._connection = connection
        self._owner = owner
        self._slots = slots
        self._jobs = jobs
        self._uploads = uploads
        self._streams = streams
        self._counts = counts
        self._log = log
        self._server_id = server_id
        self._fingerprint = fingerprint
        self._max_input_bytes = max_input_bytes

    def pushed(self, message: Any) -> None:
        """A message came through the queue group and used up a credit, whatever it is."""
        try:
            fields = read_map(message.data)
            run = plain_requests.as_run(fields) if "t" not in fields else parse_map(fields)
            if not isinstance(run, Run):
                raise BadRequestError(f"{run.kind!r} does not belong on {message.subject}")
        except Exception:
            self._owner.apply(self._slots.bounce(_now()))
            raise
        plain = fields if "t" not in fields else None
        if self._is_news(run):
            verdict = self._slots.push(
                run.job, run.size, _now(), client=run.client, input_bytes=_input_bytes(run, len(message.data))
            )
            self._settle(run, message.reply, plain, verdict)
        else:
            self._owner.apply(self._slots.bounce(_now()))
            self._again_or_refuse(run, message.reply, plain)

    def granted(self, run: Run, reply: str) -> None:
        """A job came straight to this server."""
        if self._is_news(run):
            verdict = self._slots.redeem(
                run.grant or "", run.client, run.job, run.size, _now(), input_bytes=_input_bytes(run, 0)
            )
            self._settle(run, reply, None, verdict)
        else:
            self._owner.apply(self._slots.waste(run.grant or "", run.client, _now()))
            self._again_or_refuse(run, reply, None)

    def is_other_fingerprint(self, fingerprint: str | None) -> bool:
        """Whether a client pinned something else than what is served here."""
        return fingerprint is not None and fingerprint != self._fingerprint

    def _is_news(self, run: Run) -> bool:
        return not (_is_late(run) or self.is_other_fingerprint(run.fingerprint) or self._jobs.get(run.job))

    def _again_or_refuse(self, run: Run, reply: str, plain: dict[str, Any] | None) -> None:
        """A job that came too late, is for another fingerprint, or is here already."""
        if _is_late(run):
            self._counts["expired"] += 1
            self._log.step("refused as late", run.job, attempt=run.attempt, client=run.client)
            raise LateRequestError(
                f"job {run.job} reached the server {time.time() - (run.start_by or 0.0):.1f} s too late; "
                "if it was just sent, the clocks of the two hosts differ",
                origin=self._server_id,
            )
        if self.is_other_fingerprint(run.fingerprint):
            self._say_busy(run, reply, plain, "fingerprint")
        elif (job := self._jobs.mentioned(run.job, run.client, _now())) is not None:
            self._counts["repeated"] += 1
            self._log.step("is here already", run.job, attempt=run.attempt, client=run.client, state=job.state.value)
            job.reply, job.attempt = reply, run.attempt
            self._accept(run, reply)
            if job.state is JobState.DONE:
                self._owner.tell_again(job)
        else:
            raise BadRequestError(f"job {run.job} is here already, and is another client's")

    def _settle(
        self, run: Run, reply: str, plain: dict[str, Any] | None, verdict: tuple[bool, list[Instruction]]
    ) -> None:
        """Whatever goes wrong here, the slots are obeyed, and a job that was not begun keeps none."""
        admitted, instructions = verdict
        try:
            if admitted:
                self._take(run, reply, plain)
            else:
                self._say_busy(run, reply, plain, "full" if self._owner.state == "ready" else "draining")
        except Exception:
            if admitted:
                instructions = [*instructions, *self._undo(run, reply, plain)]
            raise
        finally:
            self._owner.apply(instructions)

    def _undo(self, run: Run, reply: str, plain: dict[str, Any] | None) -> list[Instruction]:
        self._uploads.drop(run.job)
        self._jobs.release([run.job], run.client if plain is None else reply)
        return self._slots.release(run.job, _now())

    def _take(self, run: Run, reply: str, plain: dict[str, Any] | None) -> None:
        client = run.client if plain is None else reply
        job = Job(run.job, client, run.attempt, run.size, reply, _now(), plain=plain is not None)
        job.progress = self._streams.buffer_for(run)
        self._jobs.add(job, _now())
        self._counts["jobs"] += 1
        self._counts["retried"] += run.attempt > 1
        self._counts["received_bytes"] += len(run.body or b"")
        self._log.step("accepted", run.job, attempt=run.attempt, client=client, bytes=len(run.body or b""))
        if plain is not None:
            self._owner.start(job, Work(run.job, run.size, call=plain, compress=False))
        else:
            self._accept(run, reply)
            self._begin(job, run)

    def _begin(self, job: Job, run: Run) -> None:
        try:
            if run.upload is not None:
                self._uploads.begin(run.job, run.upload)
            elif run.body is not None:
                body = partial(unpack_body, run.body, run.encoding, max_bytes=self._max_input_bytes)
                body_bytes = unpacked_bytes(run.body, run.encoding)
                work = Work(run.job, run.size, body=body, body_bytes=body_bytes, progress=job.progress_attempt)
                self._owner.start(job, work)
            else:
                raise BadRequestError("run: neither 'body' nor 'upload' is there")
        except EnvbusError as error:
            self._owner.apply(self._slots.release(run.job, _now()))
            self._owner.fail(run.job, to_failure(error, origin=self._server_id))

    def _accept(self, run: Run, reply: str) -> None:
        node = self._connection.node
        accepted = Accepted(job=run.job, attempt=run.attempt, server=self._server_id, node=node)
        self._connection.send(reply, pack(accepted))

    def _say_busy(self, run: Run, reply: str, plain: dict[str, Any] | None, reason: BusyReason) -> None:
        self._counts["busy"] += 1
        self._log.step("refused", run.job, attempt=run.attempt, client=run.client, reason=reason)
        if plain is not None:
            self._connection.send(reply, plain_requests.busy(reason))
            return
        busy = Busy(job=run.job, attempt=run.attempt, server=self._server_id, reason=reason)
        self._connection.send(reply, pack(busy))


def _input_bytes(run: Run, message_bytes: int) -> int:
    """What a job's input takes of this server's memory, from now until the job has ended."""
    if run.upload is not None:
        return max(run.upload.size, run.upload.raw_size) + run.upload.parts * PART_OVERHEAD_BYTES
    return max(unpacked_bytes(run.body or b"", run.encoding), message_bytes)


def _is_late(run: Run) -> bool:
    return run.start_by is not None and time.time() > run.start_by


def _now() -> float:
    return time.monotonic()
