"""How many servers an env needs, by its load (pure): up at once, down slowly and only when surely not needed."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from envbus.controller.policies import AutoscalePolicy

RATE_WINDOW_S = 15.0
"""The time that a rollout takes is estimated over this window."""
UP_TOLERANCE = 0.05
DOWN_TOLERANCE = 0.1
"""Fewer servers must have this share of slots to spare: load at the edge does not make them come and go."""


@dataclass(frozen=True, slots=True)
class Load:
    """One sample of an env's load, as far as it falls to the servers that are scaled."""

    slots_per_server: float
    in_flight: float
    waiting: float
    """Jobs that wait for a slot."""
    ended: int
    """Jobs that ended so far."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    in_flight: float
    ended: int


class Autoscaler:
    """Decides for one env; feed it about once a second."""

    def __init__(self, policy: AutoscalePolicy) -> None:
        self._policy = policy
        self._samples: deque[_Sample] = deque()
        self._needs: deque[tuple[float, int]] = deque()
        """What was needed to be safe when going down, over the window."""
        self._window_since: float | None = None
        self._stepped_at = -math.inf

    def outage(self, outage_s: float) -> None:
        """For so long nothing was heard: the time does not count towards going down."""
        if self._window_since is not None:
            self._window_since += outage_s
        self._needs = deque((at + outage_s, need) for at, need in self._needs)
        self._samples.clear()

    def decide(self, load: Load, replicas: int, now: float) -> int:
        """Return how many servers there shall be.

        Args:
            load: The load now.
            replicas: How many are wanted so far.
            now: Clock in seconds.
        """
        policy = self._policy
        demand = self._demand(load, now)
        need = self._servers_for(demand * (1 - UP_TOLERANCE), load)
        self._remember(self._servers_for(demand * (1 + DOWN_TOLERANCE), load), now)
        if need > replicas or replicas < policy.min:
            return max(policy.min, min(policy.max, max(need, replicas)))
        if replicas > policy.max:
            return policy.max
        return self._down(replicas, now)

    def _demand(self, load: Load, now: float) -> float:
        """Slots that would be in use if there were enough."""
        self._samples.append(_Sample(now, load.in_flight, load.ended))
        while now - self._samples[0].at > RATE_WINDOW_S:
            self._samples.popleft()
        duration_s = self._rollout_s()
        share = 1.0 if duration_s is None else min(1.0, duration_s / self._policy.clear_within_s)
        return load.in_flight + load.waiting * share

    def _rollout_s(self) -> float | None:
        """How long a rollout takes: rollouts under way over rollouts per second (Little's law)."""
        first, last = self._samples[0], self._samples[-1]
        ended = last.ended - first.ended
        if ended <= 0 or last.at <= first.at:
            return None
        under_way = sum(sample.in_flight for sample in self._samples) / len(self._samples)
        return under_way * (last.at - first.at) / ended

    def _servers_for(self, demand: float, load: Load) -> int:
        wanted = demand / (max(load.slots_per_server, 1.0) * self._policy.target_utilisation)
        return max(self._policy.min, min(self._policy.max, math.ceil(wanted - 1e-9)))

    def _remember(self, need: int, now: float) -> None:
        self._window_since = now if self._window_since is None else self._window_since
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()  # never the largest again
        self._needs.append((now, need))
        while now - self._needs[0][0] > self._policy.down_after_s:
            self._needs.popleft()

    def _down(self, replicas: int, now: float) -> int:
        policy = self._policy
        largest_need = self._needs[0][1]
        watched_s = now - (self._window_since if self._window_since is not None else now)
        is_due = watched_s >= policy.down_after_s and now - self._stepped_at >= policy.down_step_s
        if largest_need >= replicas or not is_due:
            return replicas
        self._stepped_at = now
        return max(largest_need, replicas - max(1, replicas // 4))
