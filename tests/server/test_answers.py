"""What a server answers to a check."""

from __future__ import annotations

from collections import Counter

from envbus.bus.failures import to_failure
from envbus.bus.messages import Check, pack
from envbus.errors import BadRequestError
from envbus.server.answers import MAX_FAILURES_TOLD, Answers
from envbus.server.jobs import Job, Jobs, LeaseLimits
from envbus.server.uploads import Uploads

LIMITS = LeaseLimits(
    probe_after_s=3, orphan_grace_s=10, orphan_timeout_s=300, hold_results_s=600, hold_results_bytes=1_000
)


def test_many_failures_fit_on_a_message_and_are_all_told_in_the_end() -> None:
    """P05: an answer that does not fit would never arrive, and the server would pass for stalled."""
    jobs = Jobs(LIMITS)
    answers = Answers(jobs, Uploads(1_000), server_id="s", counts=Counter())
    error: Exception = BadRequestError("\N{HAMMER AND WRENCH}" * 5_000)
    for _ in range(12):
        outer = BadRequestError("\N{HAMMER AND WRENCH}" * 5_000)
        outer.__cause__, error = error, outer
    waiting = {f"job{number}" for number in range(3 * MAX_FAILURES_TOLD)}
    for job_id in sorted(waiting):
        jobs.add(Job(job_id, "c", 1, 1, "_INBOX.a.b", 0.0), 0.0)
        jobs.finish(job_id, to_failure(error, origin="s"), size_bytes=0, is_failure=True, now=0.0)
    for _ in range(3):
        status = answers.status(Check(client="c", jobs=sorted(waiting)), 1.0)
        assert len(pack(status)) < 1024 * 1024
        assert set(status.running) == waiting - {failure.job for failure in status.failed}
        waiting = set(status.running)
        jobs.release([failure.job or "" for failure in status.failed], "c")
    assert not waiting
    assert len(jobs) == 0
