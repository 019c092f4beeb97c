"""What a server remembers of ended rollouts: counts by type and duration, and the last few. Bounded, no I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from envbus.bus.messages import DURATION_BOUNDS_S, RecentRollout
from envbus.evaluation.summary import finite_number
from envbus.job_log import counted

MAX_RECENT = 5
MAX_ERROR_TYPES = 40
OTHER_TYPES = "(other types)"
CLIENT_DIGITS = 8
_MAX_NAME_CHARS = 64
_WORDS = {
    "jobs": "job{s} taken",
    "retried": "of them lost elsewhere before",
    "repeated": "sent here twice",
    "busy": "turned away",
    "expired": "refused as late",
    "orphaned": "dropped for want of their client",
    "lost_results": "result{s} lost",
    "unconfirmed_results": "result{s} let go unconfirmed",
    "done": "rollout{s} done",
    "failed": "failed",
    "cancelled": "cancelled",
    "refused": "bad message{s}",
    "no_inbox": "without an inbox",
}


def life_in_numbers(counts: Mapping[str, int]) -> str:
    """Say in one line what a server did, and what went wrong."""
    return counted(counts, _WORDS) or "no job came"


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """One rollout that ended, as its output says."""

    example_id: str
    reward: float | None
    error: str | None
    duration_s: float


def ended_rollout(output: Mapping[str, Any], *, job_s: float) -> EndedRollout:
    """Read an output.

    Args:
        output: As the environment gave it.
        job_s: Duration of the whole job, for outputs that do not state their own.
    """
    timing = output.get("timing")
    total_s = finite_number(timing.get("total_s")) if isinstance(timing, Mapping) else None
    error = output.get("error")
    return EndedRollout(
        example_id=str(output.get("example_id", "?"))[:_MAX_NAME_CHARS],
        reward=None if error is not None else finite_number(output.get("reward")),
        error=None if error is None else _error_type(error),
        duration_s=job_s if total_s is None else max(0.0, total_s),
    )


def _error_type(error: Any) -> str:
    kind = error.get("error") if isinstance(error, Mapping) else None
    return (str(kind) if kind else type(error).__name__)[:_MAX_NAME_CHARS]


class RolloutLog:
    """Counts the rollouts of one server and keeps the last few for its next heartbeat."""

    def __init__(self) -> None:
        self.failed_by_type: Counter[str] = Counter()
        self.duration_counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self.duration_sum_s = 0.0
        self.last_error = ""
        self._recent: deque[tuple[EndedRollout, str]] = deque(maxlen=MAX_RECENT)

    def add(self, rollouts: Iterable[EndedRollout], client: str) -> None:
        """Take in the rollouts of a job that ended."""
        for rollout in rollouts:
            self.duration_counts[bisect_left(DURATION_BOUNDS_S, rollout.duration_s)] += 1
            self.duration_sum_s += rollout.duration_s
            if rollout.error is not None:
                self._count_error(rollout.error)
            self._recent.append((rollout, client))

    def _count_error(self, kind: str) -> None:
        self.last_error = kind
        if kind not in self.failed_by_type and len(self.failed_by_type) >= MAX_ERROR_TYPES:
            kind = OTHER_TYPES
        self.failed_by_type[kind] += 1

    def take_recent(self) -> list[RecentRollout]:
        """Return the last rollouts since the last call, oldest first."""
        taken, self._recent = self._recent, deque(maxlen=MAX_RECENT)
        return [
            RecentRollout(
                example_id=rollout.example_id,
                reward=rollout.reward,
                error=rollout.error,
                duration_s=round(rollout.duration_s, 3),
                client=client[:CLIENT_DIGITS],
            )
            for rollout, client in taken
        ]
