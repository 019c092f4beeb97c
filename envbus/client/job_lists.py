"""Lists of jobs in messages to servers: cut so that each fits, also where NATS's max_payload is small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_JOBS = 5_000
"""Named in one message."""
JOB_BYTES = 40
"""What a job's id takes in it, or in its answer."""
ENVELOPE_JOBS = 10
"""What the rest of it takes, in ids."""


def jobs_per_message(max_payload: int, *, extra_bytes: int = 0) -> int:
    """Return how many jobs a message may name, if each takes so many bytes beside its id."""
    return max(1, min(MAX_JOBS, max_payload // (JOB_BYTES + extra_bytes) - ENVELOPE_JOBS))


def in_messages(jobs: Sequence[str], max_payload: int, *, extra_bytes: int = 0) -> Iterator[list[str]]:
    """Return the jobs as one list for each message."""
    count = jobs_per_message(max_payload, extra_bytes=extra_bytes)
    for start in range(0, len(jobs), count):
        yield list(jobs[start : start + count])
