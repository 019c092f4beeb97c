"""How the autoscaler follows a step and a sawtooth of load, beside an ideal that knows the load and loads in no time.

    python -m bench.autoscale

A simulation: jobs arrive evenly, each holds a slot for a fixed time, new servers
need time to load, those given up finish their jobs first. Nothing depends on the machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from envbus.controller.autoscale import Autoscaler, Load
from envbus.controller.policies import AutoscalePolicy

STEP_S = 0.1
JOB_S, SLOTS, LOAD_S = 5.0, 8, 4.0
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Tick:
    """One second of a run."""

    at: float
    wanted: int
    ready: int
    ideal: int
    in_flight: int
    waiting: int


@dataclass
class Run:
    """What a simulation shows."""

    ticks: list[Tick] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    @property
    def longest_wait_s(self) -> float:
        return max(self.waits_s, default=0.0)

    @property
    def mean_wait_s(self) -> float:
        return sum(self.waits_s) / max(1, len(self.waits_s))

    @property
    def changes(self) -> int:
        return sum(a.wanted != b.wanted for a, b in itertools.pairwise(self.ticks))

    @property
    def reversals(self) -> int:
        """Times that it turned from growing to shrinking or back."""
        steps = [b.wanted - a.wanted for a, b in itertools.pairwise(self.ticks) if b.wanted != a.wanted]
        return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))

    @property
    def cost(self) -> float:
        """Server seconds over those of the ideal."""
        return sum(tick.wanted for tick in self.ticks) / sum(tick.ideal for tick in self.ticks)


def simulate(policy: AutoscalePolicy, rate: Callable[[float], float], *, seconds: float) -> Run:
    """Run the load `rate(t)`, in jobs per second, against an autoscaled env."""
    scaler, run, wanted = Autoscaler(policy), Run(), policy.min
    loading: list[float] = []
    ready, ended, arrived = policy.min, 0, 0.0
    queue: deque[float] = deque()
    ends: list[float] = []
    for number in range(round(seconds / STEP_S)):
        now = number * STEP_S
        arrived += rate(now) * STEP_S
        while arrived >= 1:
            arrived -= 1
            queue.append(now)
        while ends and ends[0] <= now:
            heapq.heappop(ends)
            ended += 1
        while loading and loading[0] <= now:
            ready += 1
            loading.pop(0)
        while queue and len(ends) < ready * SLOTS:
            run.waits_s.append(now - queue.popleft())
            heapq.heappush(ends, now + JOB_S)
        if number % round(1 / STEP_S) == 0:
            wanted = scaler.decide(Load(SLOTS, len(ends), len(queue), ended), wanted, now)
            while ready + len(loading) > wanted and loading:
                loading.pop()
            ready = min(ready, wanted)
            loading += [now + LOAD_S] * (wanted - ready - len(loading))
            ideal = math.ceil(rate(now) * JOB_S / (SLOTS * policy.target_utilisation))
            ideal = max(policy.min, min(policy.max, ideal))
            run.ticks.append(Tick(now, wanted, ready, ideal, len(ends), len(queue)))
    return run


def step(now: float) -> float:
    """1 job/s, from 60 s to 240 s ten times as many."""
    return 10.0 if 60 <= now < 240 else 1.0


def sawtooth(now: float) -> float:
    """From 1 to 10 jobs/s within 40 s, again and again."""
    return 1.0 + 9.0 * (now % 40) / 40


def bars(values: list[int], highest: int) -> str:
    return "".join(BARS[round((len(BARS) - 1) * value / highest)] for value in values)


def show(name: str, run: Run) -> None:
    highest = max(max(tick.wanted, tick.ideal) for tick in run.ticks)
    shown = run.ticks[:: max(1, len(run.ticks) // 100)]
    print(f"\n{name}: {len(run.waits_s)} jobs of {JOB_S:g} s, {SLOTS} slots a server, which loads for {LOAD_S:g} s")
    print(f"  ideal   {bars([tick.ideal for tick in shown], highest)}  up to {max(t.ideal for t in run.ticks)} servers")
    print(f"  servers {bars([tick.wanted for tick in shown], highest)}  up to {max(t.wanted for t in run.ticks)}")
    print(f"  wait of a job: mean {run.mean_wait_s:.2f} s, longest {run.longest_wait_s:.1f} s")
    print(f"  server seconds: {run.cost:.2f} of the ideal's; {run.changes} changes, {run.reversals} turns")


def main() -> None:
    policy = AutoscalePolicy(min=1, max=20)
    show("step", simulate(policy, step, seconds=400))
    show("sawtooth", simulate(policy, sawtooth, seconds=400))
    quick = policy.model_copy(update={"down_after_s": 0.0, "down_step_s": 1.0})
    show("sawtooth, without the patience on the way down", simulate(quick, sawtooth, seconds=400))


if __name__ == "__main__":
    main()
