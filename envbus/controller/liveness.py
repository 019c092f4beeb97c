"""Whether one server that has not ended still lives, by what is heard of it (pure).

Silence makes it suspect, then stuck; so does a loop that neither runs nor uses CPU,
and work that does not move. A busy loop is not death: its beats still come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envbus.controller.policies import LivenessPolicy

BLOCKED_LAG_S = 1.0
"""A loop that has not answered for this long counts as blocked."""
IDLE_CPU_SHARE = 0.02
"""Less of one core than this is no work."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What one heartbeat says."""

    state: str
    in_flight: int = 0
    waiting: int = 0
    ended: int = 0
    """Jobs that ended so far, whatever the outcome."""
    lag_s: float = 0.0
    cpu_s: float | None = None
    """CPU time used so far by the process and its descendants, if it was measured."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a server may be dead."""

    level: Literal["suspect", "stuck"]
    reason: str


@dataclass(slots=True)
class Vitals:
    """The clocks of one server."""

    launched_at: float
    heard_at: float
    moved_at: float
    """When work last moved, or there was none to move."""
    alive_at: float
    """When its loop last ran, or it last used CPU."""
    has_beaten: bool = False
    """Before, it is not expected to: starting an interpreter and reaching NATS take what they take."""
    signs: Signs | None = None

    @classmethod
    def begin(cls, now: float, *, has_beaten: bool = False) -> Vitals:
        """The clocks of a server that is launched now, or of one that beat elsewhere and is taken over."""
        return cls(launched_at=now, heard_at=now, moved_at=now, alive_at=now, has_beaten=has_beaten)

    def hear(self, now: float) -> None:
        """It answered a question."""
        self.heard_at = now

    def beat(self, signs: Signs, now: float) -> None:
        """It beat."""
        before, self.signs = self.signs, signs
        is_serving = signs.state in ("ready", "full")
        is_due = is_serving and signs.in_flight > 0 and signs.waiting > 0
        if not is_due or before is None or before.ended != signs.ended:
            self.moved_at = now
        if not is_serving or signs.lag_s < BLOCKED_LAG_S or self._is_working(before, now):
            self.alive_at = now
        self.heard_at = now
        self.has_beaten = True

    def _is_working(self, before: Signs | None, now: float) -> bool:
        cpu_s = self.signs.cpu_s if self.signs is not None else None
        if cpu_s is None or before is None or before.cpu_s is None:
            return True  # not known to be idle
        return cpu_s - before.cpu_s > IDLE_CPU_SHARE * (now - self.heard_at)

    def shift(self, outage_s: float) -> None:
        """For so long nothing could be heard."""
        self.launched_at += outage_s
        self.heard_at += outage_s
        self.moved_at += outage_s
        self.alive_at += outage_s

    def doubt(self, policy: LivenessPolicy, now: float) -> Doubt | None:
        """Return the gravest doubt about it, if there is one."""
        if not self.has_beaten:
            return _doubt(now - self.launched_at, policy.load_timeout_s, policy.load_timeout_s, "no sign of it")
        is_loading = self.signs is not None and self.signs.state == "loading"
        doubts = [
            _doubt(now - self.heard_at, policy.suspect_after_s, policy.stuck_after_s, "no heartbeat"),
            _doubt(now - self.alive_at, policy.blocked_after_s / 2, policy.blocked_after_s, "its loop stands still"),
            _doubt(now - self.moved_at, policy.no_progress_s / 2, policy.no_progress_s, "no job ends and jobs wait"),
        ]
        if is_loading:
            limit_s = policy.load_timeout_s
            doubts = [doubts[0], _doubt(now - self.launched_at, limit_s, limit_s, "still loading")]
        found = [doubt for doubt in doubts if doubt is not None]
        return next((doubt for doubt in found if doubt.level == "stuck"), found[0] if found else None)


def _doubt(age_s: float, suspect_s: float, stuck_s: float, what: str) -> Doubt | None:
    if age_s >= stuck_s:
        return Doubt("stuck", f"{what} for {age_s:.0f} s")
    if age_s >= suspect_s:
        return Doubt("suspect", f"{what} for {age_s:.0f} s")
    return None
