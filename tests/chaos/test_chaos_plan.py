"""Plans of faults: repeatable, complete, one fault per target at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from chaos_plan import KINDS, Fault, Scale, make_plan

SCALE = Scale(every_s=1.0, longest_stop_s=40.0, longest_outage_s=30.0, longest_other_s=20.0)
NAMES = {
    "server": ["server-0", "server-1"],
    "managed": ["managed"],
    "client": ["client-0", "client-1"],
    "controller": ["controller"],
    "nats": ["nats"],
}


def plan(seed: int, duration_s: float = 600.0) -> list[Fault]:
    return make_plan(seed, duration_s=duration_s, names=NAMES, scale=SCALE)


def test_a_seed_makes_one_plan() -> None:
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes(seed: int) -> None:
    assert {(fault.role, fault.kind) for fault in plan(seed)} == {
        (r, kind) for r, kinds in KINDS.items() for kind in kinds
    }


@pytest.mark.parametrize("seed", range(20))
def test_no_target_has_two_faults_at_a_time_and_all_end_in_time(seed: int) -> None:
    spans = defaultdict(list)
    for fault in plan(seed):
        spans[fault.target].append((fault.at_s, fault.at_s + fault.for_s))
    for taken in spans.values():
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(taken))
        assert taken[-1][1] <= 600.001


def test_stops_and_outages_are_short_and_long() -> None:
    stops = [
        fault.for_s for seed in range(5) for fault in plan(seed) if fault.kind == "stop" and fault.role == "server"
    ]
    outages = [fault.for_s for seed in range(5) for fault in plan(seed) if fault.role == "nats"]
    assert min(stops) < 4 < 25 < max(stops) <= 40
    assert min(outages) < 4 < 15 < max(outages) <= 30


def test_without_a_role_none_of_its_faults_come() -> None:
    only_servers = make_plan(1, duration_s=100, names={"server": ["s"]}, scale=SCALE)
    assert {fault.role for fault in only_servers} == {"server"}
