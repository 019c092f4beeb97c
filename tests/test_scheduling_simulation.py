"""Servers and clients in virtual time: nothing is stuck, lost, run twice or starved (CASES P12, P14, P15, P31, P52)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from simulation import SimClient, Simulation

STEADY_S = 0.05


def steady() -> float:
    return STEADY_S


def fleet(sim: Simulation, *capacities: int) -> None:
    for number, capacity in enumerate(capacities):
        sim.server(f"s{number}", capacity)


def keep_in_flight(client: SimClient, *, total: int, at_once: int, start_s: float) -> None:
    """A trainer that sends the next job when one is done."""
    left = [total - at_once]

    def more() -> None:
        if left[0] > 0:
            left[0] -= 1
            client.submit()

    client.on_job_done = more
    client.submit_at(start_s, at_once)


def assert_nothing_left(sim: Simulation) -> None:
    sim.settle()
    for server in sim.servers.values():
        if server.dead:
            continue
        assert server.running == {}
        assert server.slots.in_flight == 0
        assert len(server.slots.line) == 0
        assert server.slots._grants == {}
        assert server.slots.free + server.slots.credits == server.slots.capacity
    for client in sim.clients.values():
        assert client.dispatch.pending() == []
        assert (len(client.attempts), client.attempts.holders()) == (0, {})
        assert set(client.results.values()) <= {1}, "one result per job"


def assert_within_capacity(sim: Simulation) -> None:
    """CASES P31, P52: never more than the capacity, but for the rest of one group."""
    for server in sim.servers.values():
        assert server.most_running <= server.slots.capacity + max(0, server.largest - 1)


@pytest.mark.parametrize("seed", range(5))
def test_64_jobs_on_8_servers_of_2_slots_finish_close_to_the_ideal(seed: int) -> None:
    sim = Simulation(seed=seed)
    fleet(sim, *[2] * 8)
    sim.client("a", duration_s=steady).submit_at(1.0, 64)
    assert sim.run_until_done(limit_s=10) - 1.0 < 1.1 * 64 * STEADY_S / 16
    assert set(sim.starts.values()) == {1}
    assert_within_capacity(sim)
    assert_nothing_left(sim)


@pytest.mark.parametrize("seed", range(3))
def test_a_late_small_client_is_not_starved_by_a_big_one(seed: int) -> None:
    sim = Simulation(seed=seed)
    fleet(sim, *[2] * 8)
    big, small = sim.client("big", duration_s=steady), sim.client("small", duration_s=steady)
    big.submit_at(1.0, 1500)
    small.submit_at(2.0, 20)
    end = sim.run_until_done(limit_s=20)
    assert small.done_at - 2.0 < 0.3
    assert end - 1.0 < 1.05 * 1520 * STEADY_S / 16
    assert set(sim.starts.values()) == {1}
    assert_nothing_left(sim)


@pytest.mark.parametrize("at_once", [1, 4, 15, 16, 17, 20, 32, 64])
def test_a_client_that_keeps_n_jobs_in_flight_keeps_the_slots_busy(at_once: int) -> None:
    """Just over the capacity is the hard part: the line empties again and again."""
    sim = Simulation(seed=at_once)
    fleet(sim, *[4] * 4)
    client = sim.client("a", duration_s=lambda: sim.random.uniform(0.02, 0.08))
    keep_in_flight(client, total=500, at_once=at_once, start_s=1.0)
    assert sim.run_until_done(limit_s=60) - 1.0 < 1.15 * 500 * STEADY_S / min(16, at_once)
    assert set(sim.starts.values()) == {1}
    assert_nothing_left(sim)


def test_equal_clients_finish_together() -> None:
    sim = Simulation(seed=1)
    fleet(sim, *[4] * 4)
    for name in "abc":
        sim.client(name, duration_s=steady).submit_at(1.0, 200)
    sim.run_until_done(limit_s=20)
    ends = [client.done_at for client in sim.clients.values()]
    assert max(ends) - min(ends) < 0.1 * (max(ends) - 1.0)


def test_priority_goes_first() -> None:
    sim = Simulation(seed=1)
    fleet(sim, *[4] * 4)
    sim.client("low", duration_s=steady).submit_at(1.0, 400)
    high = sim.client("high", duration_s=steady, priority=1)
    high.submit_at(1.5, 160)
    sim.run_until_done(limit_s=20)
    assert high.done_at - 1.5 < 1.25 * 160 * STEADY_S / 16


def test_a_server_that_opens_later_gets_work() -> None:
    sim = Simulation(seed=1)
    sim.server("first", 2)
    late = sim.server("late", 2, opens_at=3.0)
    sim.client("a", duration_s=steady).submit_at(1.0, 400)
    sim.run_until_done(limit_s=30)
    assert len(late.finished) > 50


def test_a_server_that_closes_finishes_what_it_has_and_takes_nothing_more() -> None:
    sim = Simulation(seed=1)
    fleet(sim, 4, 4)
    closing = sim.servers["s0"]
    sim.client("a", duration_s=steady).submit_at(1.0, 200)
    sim.at(1.5, closing.close)
    sim.run(until_s=1.5)
    started = sim.starts.total()
    sim.run(until_s=1.6)
    held = len(closing.finished)
    sim.run_until_done(limit_s=30)
    assert started > 0
    assert len(closing.finished) == held
    assert set(sim.starts.values()) == {1}


def test_pushes_that_a_hanging_server_swallows_are_few() -> None:
    """CASES P14: its credits are still out when it freezes."""
    sim = Simulation(seed=1)
    fleet(sim, 128, 128)
    sim.at(0.5, sim.servers["s0"].freeze)
    sim.client("a", duration_s=steady).submit_at(1.0, 200)
    assert sim.run_until_done(limit_s=30) - 1.0 < 2.5
    sim.servers["s0"].thaw()
    sim.run(until_s=sim.now + 1.0)
    assert sim.starts.total() <= 200 + 8, "what it swallowed is run twice at most, then cancelled"
    assert_nothing_left(sim)


def test_jobs_of_a_stalled_server_run_elsewhere_and_its_copies_are_stopped() -> None:
    """CASES P12."""
    sim = Simulation(seed=1)
    fleet(sim, 4, 4)
    sim.client("a", duration_s=lambda: 0.5, stall_timeout_s=5.0).submit_at(1.0, 40)
    sim.at(2.0, sim.servers["s0"].freeze)
    sim.run_until_done(limit_s=30)
    assert sim.now < 15
    sim.servers["s0"].thaw()
    assert_nothing_left(sim)


def test_jobs_of_a_dead_server_run_elsewhere() -> None:
    sim = Simulation(seed=1)
    fleet(sim, 4, 4, 4)
    sim.client("a", duration_s=lambda: 0.5).submit_at(1.0, 60)
    sim.at(2.2, sim.servers["s0"].kill)
    assert sim.run_until_done(limit_s=30) - 1.0 < 6.0
    assert max(sim.starts.values()) == 2
    assert sum(starts - 1 for starts in sim.starts.values()) <= 4 + 1
    assert_nothing_left(sim)


def test_a_dead_client_in_the_line_does_not_hold_the_slots() -> None:
    sim = Simulation(seed=1)
    fleet(sim, *[4] * 4)
    dead, alive = sim.client("dead", duration_s=steady), sim.client("alive", duration_s=steady)
    dead.submit_at(1.0, 1000)
    sim.at(2.0, dead.kill)
    alive.submit_at(2.1, 500)
    sim.run_until_done(limit_s=30)
    assert alive.done_at - 2.1 < 500 * STEADY_S / 16 + 3.0


@pytest.mark.parametrize("outage_s", [0.2, 3.0, 60.0])
def test_an_outage_of_the_client_loses_no_job_and_runs_none_twice_for_long(outage_s: float) -> None:
    sim = Simulation(seed=1)
    fleet(sim, *[2] * 8)
    client = sim.client("a", duration_s=steady)
    client.submit_at(1.0, 400)
    sim.at(1.5, client.disconnect)
    sim.at(1.5 + outage_s, client.reconnect)
    assert sim.run_until_done(limit_s=100) < 1.5 + outage_s + 400 * STEADY_S / 16 + 2.5
    assert sum(starts - 1 for starts in sim.starts.values()) <= 16
    assert_within_capacity(sim)
    assert_nothing_left(sim)


@pytest.mark.parametrize("seed", range(4))
def test_lost_messages_cost_time_only(seed: int) -> None:
    sim = Simulation(seed=seed, loss=0.03)
    fleet(sim, *[2] * 8)
    for name in "ab":
        sim.client(name, duration_s=steady).submit_at(1.0, 200)
    sim.run_until_done(limit_s=60)
    assert sim.counts["dropped"] > 0
    assert sim.now < 15
    assert_within_capacity(sim)
    assert_nothing_left(sim)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_job_ends_once(seed: int) -> None:
    """Random fleets, clients, groups, losses, deaths and stalls."""
    choose = random.Random(seed)
    sim = Simulation(seed=seed, loss=choose.choice([0.0, 0.0, 0.01, 0.05]))
    fleet(sim, *[choose.choice([1, 2, 4, 16]) for _ in range(choose.randint(2, 6))])
    disturb(sim, choose)
    for number in range(choose.randint(1, 4)):
        mean_s = choose.choice([0.005, 0.05, 0.5])
        client = sim.client(
            f"c{number}",
            duration_s=around(sim, mean_s),
            size=choose.choice([1, 1, 1, 2, 8]),
            priority=choose.choice([0, 0, 1]),
        )
        total = choose.choice([5, 50, 150])
        keep_in_flight(
            client, total=total, at_once=min(total, choose.choice([1, 4, 16, 1000])), start_s=choose.choice([0.5, 1.0])
        )
        if choose.random() < 0.2:
            sim.at(1.5, client.disconnect)
            sim.at(1.5 + choose.uniform(0.1, 20), client.reconnect)
    sim.run_until_done(limit_s=400)
    for server in sim.servers.values():
        server.thaw()
    assert_within_capacity(sim)
    assert_nothing_left(sim)


def around(sim: Simulation, mean_s: float) -> Callable[[], float]:
    return lambda: sim.random.uniform(0.5 * mean_s, 1.5 * mean_s)


def disturb(sim: Simulation, choose: random.Random) -> None:
    if len(sim.servers) > 2 and choose.random() < 0.4:
        sim.at(choose.uniform(0.1, 2), sim.servers["s0"].kill)
    if len(sim.servers) > 2 and choose.random() < 0.4:
        sim.at(choose.uniform(0.1, 2), sim.servers["s1"].freeze)
        sim.at(choose.uniform(3, 60), sim.servers["s1"].thaw)
