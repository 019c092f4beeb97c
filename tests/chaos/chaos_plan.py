"""What goes wrong when, drawn from a seed: pure, so that a run can be repeated.

No target has two faults of its own at a time; different targets have. Every kind
comes before any kind comes again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SERVER_KINDS = ("kill", "stop", "term", "cut", "half-open", "delay", "throttle", "clock", "block", "gil", "disk-full")
MANAGED_KINDS = ("kill", "stop", "term", "clock", "block", "gil")
CLIENT_KINDS = SERVER_KINDS
CONTROLLER_KINDS = ("kill", "stop", "term", "cut", "half-open", "delay")
NATS_KINDS = ("kill", "stop")
KINDS: Mapping[str, Sequence[str]] = {
    "server": SERVER_KINDS,
    "managed": MANAGED_KINDS,
    "client": CLIENT_KINDS,
    "controller": CONTROLLER_KINDS,
    "nats": NATS_KINDS,
}
MANAGED = "managed"
"""Stands for any of the controller's servers: which one is only known when the fault comes."""

RELOAD_S = 4.0
"""What a controller and its servers take to be there again."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at_s: When, after the start of the plan.
        kind: What happens, e.g. ``"kill"``; ``kill`` and ``term`` are followed by a new process after ``for_s``.
        role: Of the target: server, managed, client, controller or nats.
        target: Its name, e.g. ``"server-1"``.
        for_s: How long it lasts.
        amount: Seconds of a clock's jump or of a link's delay, bytes per second of a throttle.
    """

    at_s: float
    kind: str
    role: str
    target: str
    for_s: float
    amount: float = 0.0

    @property
    def label(self) -> str:
        """Kind and role, for counting."""
        return f"{self.kind} {self.role}"

    def __str__(self) -> str:
        amount = f", {self.amount:g}" if self.amount else ""
        return f"{self.at_s:7.2f} s: {self.kind} {self.target} for {self.for_s:.1f} s{amount}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How long things last: short in a short run, so that each has its turn."""

    every_s: float
    longest_stop_s: float
    longest_outage_s: float
    longest_other_s: float


def make_plan(seed: int, *, duration_s: float, names: Mapping[str, Sequence[str]], scale: Scale) -> list[Fault]:
    """Draw a plan.

    Args:
        seed: The same seed and arguments make the same plan.
        duration_s: All faults end before this.
        names: Role → names of its processes.
        scale: How often and how long.
    """
    rng = random.Random(seed)
    pairs = [(kind, role) for role, kinds in KINDS.items() if names.get(role) for kind in kinds]
    plan: list[Fault] = []
    free_at: dict[str, float] = {}
    waiting: list[tuple[str, str]] = []
    at_s = 0.0
    while at_s < duration_s - 1:
        waiting = waiting or rng.sample(pairs, len(pairs))
        for kind, role in waiting:
            free = [name for name in names[role] if free_at.get(name, 0.0) <= at_s]
            if free:
                fault = _fault(rng, at_s, kind, role, rng.choice(free), duration_s=duration_s, scale=scale)
                plan.append(fault)
                free_at[fault.target] = at_s + fault.for_s + scale.every_s
                if role == "controller":  # its servers end and come back with it
                    free_at[MANAGED] = free_at[fault.target] + RELOAD_S
                waiting.remove((kind, role))
                break
        at_s += rng.uniform(0.5, 1.5) * scale.every_s
    return plan


def _fault(
    rng: random.Random, at_s: float, kind: str, role: str, target: str, *, duration_s: float, scale: Scale
) -> Fault:
    if role == "nats":
        longest_s = scale.longest_outage_s
    elif kind == "stop":
        longest_s = scale.longest_stop_s
    else:
        longest_s = scale.longest_other_s
    # Short ones are as interesting as long ones: drawn evenly over the orders of magnitude.
    for_s = min(longest_s, longest_s ** rng.uniform(0, 1)) if longest_s > 1 else longest_s
    amount = 0.0
    match kind:
        case "clock":
            amount = rng.choice([-3600.0, -20.0, -5.0, 5.0, 10.0, 3600.0])
        case "delay":
            amount = rng.choice([0.05, 0.3, 1.0])
        case "throttle":
            amount = rng.choice([20_000.0, 100_000.0, 1_000_000.0])
    return Fault(round(at_s, 3), kind, role, target, round(min(for_s, duration_s - at_s), 3), amount)
