"""What the dashboard remembers of the last minutes (pure): counts per second, curves, the last rollouts.

Heartbeats carry totals; what happened is the difference of two. All lists are bounded.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from envbus.bus.messages import Beat, RecentRollout
from envbus.controller.fleet_views import EnvView, FleetView

WINDOW_S = 600
"""How far back curves and failure counts reach."""
RATE_S = 5
"""Rates are means over so many seconds."""
ENV_POINTS = 120
MAX_RECENT = 40
MAX_REWARDS = 50
MAX_ENVS = 500


@dataclass(frozen=True, slots=True)
class Seen:
    """A rollout that ended, and when and where it was heard of."""

    number: int
    """Counts up: a name for it on the page."""
    at: float
    """Seconds since the epoch."""
    env: str
    server: str
    rollout: RecentRollout


@dataclass(frozen=True, slots=True)
class Point:
    """The fleet in one second."""

    at: int
    """Seconds since the epoch."""
    in_flight: int
    slots: int
    done_per_s: float
    failed_per_s: float
    waiting_jobs: int


@dataclass(slots=True)
class _Second:
    at: int
    done: int = 0
    failed: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By env and type."""
    envs: Counter[str] = field(default_factory=Counter)
    """Failed rollouts by env."""


class History:
    """The last minutes of one fleet."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=WINDOW_S)
        self.recent: deque[Seen] = deque(maxlen=MAX_RECENT)
        self._seconds: deque[_Second] = deque()
        self._beats: dict[str, Beat] = {}
        self._env_rates: dict[str, deque[float]] = {}
        self._rewards: dict[str, deque[float]] = {}
        self._number = 0

    def beat(self, beat: Beat, at: float) -> None:
        """Take in a heartbeat."""
        before = self._beats.get(beat.server)
        self._beats[beat.server] = beat
        if before is not None and before.started_at == beat.started_at:
            self._count(before, beat, int(at))
        for rollout in beat.recent:
            self._number += 1
            self.recent.append(Seen(self._number, at, beat.env, beat.server, rollout))
            if rollout.reward is not None and (beat.env in self._rewards or len(self._rewards) < MAX_ENVS):
                self._rewards.setdefault(beat.env, deque(maxlen=MAX_REWARDS)).append(rollout.reward)

    def _count(self, before: Beat, beat: Beat, at: int) -> None:
        if not self._seconds or self._seconds[-1].at < at:
            self._seconds.append(_Second(at))
        second = self._seconds[-1]
        failed = max(0, beat.failed - before.failed)
        second.done += max(0, beat.done - before.done)
        second.failed += failed
        second.envs[beat.env] += failed
        for kind, count in beat.failed_by_type.items():
            new = count - before.failed_by_type.get(kind, 0)
            if new > 0:
                second.errors[beat.env, kind] += new

    def tick(self, view: FleetView, at: float) -> None:
        """Add a point to the curves if a new second has begun."""
        now = int(at)
        if self.points and self.points[-1].at >= now:
            return
        self._forget(view, now)
        window = [second for second in self._seconds if now - RATE_S <= second.at < now]
        self.points.append(
            Point(
                now,
                view.totals.in_flight,
                view.totals.slots,
                round(sum(second.done for second in window) / RATE_S, 3),
                round(sum(second.failed for second in window) / RATE_S, 3),
                view.totals.waiting_jobs,
            )
        )
        for env in view.envs[:MAX_ENVS]:
            rates = self._env_rates.setdefault(env.env, deque([0.0] * ENV_POINTS, maxlen=ENV_POINTS))
            rate = env.totals.rate_per_s
            rates.append(round(rate, 2) if math.isfinite(rate) else 0.0)

    def _forget(self, view: FleetView, now: int) -> None:
        while self._seconds and self._seconds[0].at <= now - WINDOW_S:
            self._seconds.popleft()
        there = {server.server for server in view.servers}
        self._beats = {server: beat for server, beat in self._beats.items() if server in there}
        envs = {env.env for env in view.envs}
        self._env_rates = {env: rates for env, rates in self._env_rates.items() if env in envs}
        self._rewards = {env: rewards for env, rewards in self._rewards.items() if env in envs}

    # ---- out

    def ended(self) -> tuple[int, int]:
        """Return how many rollouts were done and how many failed in the window."""
        return sum(second.done for second in self._seconds), sum(second.failed for second in self._seconds)

    def failures(self) -> Counter[tuple[str, str]]:
        """Return the failures of the window by env and type."""
        return sum((second.errors for second in self._seconds), Counter())

    def failed_of(self, env: EnvView) -> int:
        """Return how many rollouts of an env failed in the window."""
        return sum(second.envs[env.env] for second in self._seconds)

    def rates(self, env: EnvView) -> list[float]:
        """Return an env's rollouts per second over the last minutes, oldest first."""
        return list(self._env_rates.get(env.env, ()))

    def reward(self, env: EnvView) -> float | None:
        """Return the mean reward of the env's last rollouts that were heard of."""
        rewards = self._rewards.get(env.env)
        return sum(rewards) / len(rewards) if rewards else None
