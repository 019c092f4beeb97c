"""How many servers an env gets by its load: tables, and simulated traces of the benchmark (pure)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.controller.autoscale import Autoscaler, Load
from envbus.controller.policies import AutoscalePolicy

POLICY = AutoscalePolicy(min=1, max=10, target_utilisation=0.8, clear_within_s=30, down_after_s=60, down_step_s=10)


def load(in_flight: float = 0, waiting: float = 0, *, ended: int = 0) -> Load:
    return Load(slots_per_server=10, in_flight=in_flight, waiting=waiting, ended=ended)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The benchmark's simulation."""
    file = Path(__file__).parents[2] / "bench" / "autoscale.py"
    spec = importlib.util.spec_from_file_location("bench_autoscale", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_autoscale"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("now_load", "replicas", "expected"),
    [
        (load(0), 1, 1),
        (load(8), 1, 1),
        (load(10), 1, 2),
        (load(10, 14), 1, 3),
        (load(10, 1_000_000), 1, 10),
        (load(16), 2, 2),
        (load(8), 5, 5),
        (load(0), 0, 1),
        (load(0), 12, 10),
    ],
    ids=["idle", "at the target", "full", "waiting", "max", "enough", "not down at once", "min", "over max"],
)
def test_first_decision(now_load: Load, replicas: int, expected: int) -> None:
    assert Autoscaler(POLICY).decide(now_load, replicas, 0) == expected


def test_short_jobs_that_wait_need_few_servers() -> None:
    """1,000 jobs of 50 ms are worked off by one server in 5 s."""
    scaler = Autoscaler(POLICY)
    scaler.decide(load(10, 1000, ended=0), 1, 0)
    assert scaler.decide(load(10, 1000, ended=200), 1, 1) == 2


def test_down_only_after_a_whole_window_and_step_by_step() -> None:
    scaler, replicas, seen = Autoscaler(POLICY), 8, []
    for now in range(120):
        replicas = scaler.decide(load(0), replicas, now)
        seen.append(replicas)
    assert set(seen[:60]) == {8}
    changes = [(now, seen[now]) for now in range(1, 120) if seen[now] != seen[now - 1]]
    assert changes == [(60, 6), (70, 5), (80, 4), (90, 3), (100, 2), (110, 1)]


def test_one_peak_in_the_window_keeps_what_it_needed() -> None:
    scaler, replicas = Autoscaler(POLICY), 8
    for now in range(100):
        replicas = scaler.decide(load(30 if now == 50 else 0), replicas, now)
    assert replicas == 5  # 30 jobs and a tenth to spare, at 80 %


def test_load_at_the_edge_makes_no_servers_come_and_go() -> None:
    scaler, replicas, seen = Autoscaler(POLICY), 2, set()
    for now in range(1000):
        replicas = scaler.decide(load(16 if now % 2 else 15.2), replicas, now)
        seen.add(replicas)
    assert seen == {2}


def test_an_outage_does_not_count_towards_going_down() -> None:
    scaler, replicas = Autoscaler(POLICY), 4
    for now in range(30):
        replicas = scaler.decide(load(0), replicas, now)
    scaler.outage(1000)
    assert scaler.decide(load(0), replicas, 1031) == 4
    assert scaler.decide(load(0), replicas, 1061) == 3


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 5000), st.integers(0, 50), st.floats(0.1, 30)), max_size=60),
    st.integers(0, 20),
)
def test_always_within_its_limits(steps: list[tuple[float, float, int, float]], replicas: int) -> None:
    scaler, now, ended = Autoscaler(POLICY), 0.0, 0
    for in_flight, waiting, more, passed_s in steps:
        now, ended = now + passed_s, ended + more
        before = replicas
        replicas = scaler.decide(load(in_flight, waiting, ended=ended), replicas, now)
        assert 1 <= replicas <= 10
        assert replicas >= min(before, 10) - max(1, before // 4)


def test_it_follows_a_step(bench: ModuleType) -> None:
    policy = AutoscalePolicy(min=1, max=20)
    run = bench.simulate(policy, bench.step, seconds=400)
    at = {round(tick.at): tick for tick in run.ticks}
    assert at[90].ready >= at[90].ideal, "there within 30 s of the step"
    assert at[90].waiting == 0
    assert run.longest_wait_s < policy.clear_within_s
    assert at[399].wanted == 1, "and gone when it is over"
    assert run.reversals == 1
    assert run.cost < 2


def test_a_sawtooth_makes_it_not_swing(bench: ModuleType) -> None:
    run = bench.simulate(AutoscalePolicy(min=1, max=20), bench.sawtooth, seconds=400)
    assert run.reversals == 0
    assert run.longest_wait_s < 5
    assert run.cost < 1.6
