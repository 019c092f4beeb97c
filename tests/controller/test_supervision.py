"""Which servers an env gets: launches, restarts, budgets, scaling, rolling restarts, stuck servers (pure)."""

from __future__ import annotations

import pytest
from supervision_stage import STOP_LIMIT_S, Host


def test_start_launches_the_replicas_in_their_places() -> None:
    host = Host(replicas=3).start()
    assert [(launch.slot, launch.generation) for _, launch in host.launches] == [(0, 0), (1, 0), (2, 0)]
    assert host.states() == {"s0": "starting", "s1": "starting", "s2": "starting"}
    host.all_ready()
    assert set(host.states().values()) == {"running"}
    assert host.env.ready_count == 3


@pytest.mark.parametrize(("random", "delays_s"), [(1.0, [1, 2, 4, 8, 16, 16]), (0.0, [0.5, 1, 2, 4, 8, 8])])
def test_the_restart_delay_grows_to_a_limit_with_jitter(random: float, delays_s: list[float]) -> None:
    host = Host(replicas=1, random=random).start()
    seen = []
    for _ in delays_s:
        host.all_ready()
        (server,) = host.processes
        host.end(server, "signal SIGKILL")
        ended_at, count = host.now, len(host.launches)
        while len(host.launches) == count:
            host.now += 0.5
            host.obey(host.env.tick(host.now))
        seen.append(host.now - ended_at)
    assert seen == delays_s


def test_when_the_next_one_comes_is_said_before_the_log() -> None:
    host = Host(replicas=1).start().all_ready()
    host.end("s0", "signal SIGKILL\n    the end of its log")
    assert "place 0: server s0 ended: signal SIGKILL (next try in 1.0 s)\n    the end of its log" in host.notes


def test_a_healthy_period_restores_the_delay() -> None:
    host = Host(replicas=1).start()
    for _ in range(4):
        host.all_ready()
        host.end(next(iter(host.processes)))
        host.wait(20)
    host.all_ready()
    host.wait(60)
    host.end(next(iter(host.processes)))
    count = len(host.launches)
    host.wait(1)
    assert len(host.launches) == count + 1


def test_crashes_while_loading_end_in_failed_and_never_loop() -> None:
    """P17: a few tries, then no more; the reason is kept."""
    host = Host(replicas=1).start()
    for _ in range(3):
        host.wait(10)
        host.end(next(iter(host.processes)), "exit code 2: no module foo_bar")
    host.wait(10_000)
    assert len(host.launches) == 3
    assert host.env.failed is not None
    assert "no module foo_bar" in host.env.failed
    (view,) = host.env.views()
    assert (view.state, view.restarts, view.last_exit) == ("failed", 2, "exit code 2: no module foo_bar")


def test_the_budget_is_one_for_all_places_and_a_ready_server_restores_it() -> None:
    host = Host(replicas=4).start()
    host.end("s0")
    host.end("s1")
    host.ready("s2")
    host.end("s3")
    host.wait(5)
    assert host.env.failed is None
    assert len(host.processes) == 4
    host.end("s4")
    host.end("s5")
    assert host.env.failed is not None
    host.wait(100)
    assert "s2" in host.processes, "what runs is left alone"
    assert len(host.launches) == 7


@pytest.mark.parametrize("order", ["scale", "restart"])
def test_an_operator_revives_a_failed_env(order: str) -> None:
    host = Host(replicas=1).start()
    for _ in range(3):
        host.wait(10)
        host.end(next(iter(host.processes)))
    host.obey(host.env.scale(1, host.now) if order == "scale" else host.env.restart(host.now))
    assert len(host.launches) == 4
    assert host.env.failed is None


def test_crashes_after_loading_are_restarted_for_ever() -> None:
    host = Host(replicas=1).start()
    for _ in range(20):
        host.all_ready()
        host.end(next(iter(host.processes)))
        host.wait(20)
    assert host.env.failed is None
    assert len(host.launches) == 21


def test_scale_up_fills_free_places() -> None:
    host = Host(replicas=2).start().all_ready()
    host.obey(host.env.scale(4, host.now))
    assert sorted(process.slot for process in host.processes.values()) == [0, 1, 2, 3]


def test_scale_down_drains_and_prefers_what_is_not_ready() -> None:
    """A server that still loads is stopped, a ready one drained: no rollout is cut."""
    host = Host(replicas=3).start()
    host.ready("s1", "s2")
    host.obey(host.env.scale(1, host.now))
    assert host.processes["s0"].stops == 1
    assert not host.processes["s0"].drained
    assert (host.processes["s2"].drained, host.processes["s2"].stops) == (True, 0)
    assert [process.server for process in host.staying()] == ["s1"]
    host.wait(3600)
    assert not host.processes["s2"].killed, "a drain takes as long as its rollouts"
    host.end("s2", "exit code 0")
    host.wait(100)
    assert len(host.launches) == 3


def test_a_drain_is_asked_for_again_until_it_ends() -> None:
    host = Host(replicas=1).start().all_ready()
    host.obey(host.env.scale(0, host.now))
    host.processes["s0"].drained = False  # the message was lost
    host.wait(6)
    assert host.processes["s0"].drained


def test_rolling_restart_replaces_one_after_the_other() -> None:
    """A new one is ready before an old one drains; never below the replica count."""
    host = Host(replicas=2).start().all_ready()
    host.obey(host.env.restart(host.now))
    assert host.launched() == ["s0", "s1", "s2"]
    assert [p.server for p in host.staying()] == ["s0", "s1", "s2"]
    host.ready("s2")
    assert host.processes["s0"].drained
    assert not host.processes["s1"].drained
    assert host.launched()[-1] == "s3"
    host.ready("s3")
    assert host.processes["s1"].drained
    assert not host.env.is_restarting
    assert {view.generation for view in host.env.views() if view.state == "running"} == {1}


def test_a_rolling_restart_that_does_not_load_leaves_the_old_ones() -> None:
    host = Host(replicas=2).start().all_ready()
    host.obey(host.env.restart(host.now))
    for _ in range(3):
        host.end(host.launched()[-1], "exit code 2")
        host.wait(20)
    assert host.env.failed is not None
    assert [p.server for p in host.staying()] == ["s0", "s1"]
    assert host.env.ready_count == 2


def test_an_old_one_that_ends_in_a_rolling_restart_is_followed_by_its_successor() -> None:
    host = Host(replicas=1).start().all_ready()
    host.obey(host.env.restart(host.now))
    host.end("s0", "signal SIGKILL")
    host.wait(30)
    assert host.launched() == ["s0", "s1"]
    host.ready("s1")
    assert host.env.ready_count == 1


def test_a_second_restart_replaces_a_successor_that_still_loads() -> None:
    host = Host(replicas=1).start().all_ready()
    host.obey([*host.env.restart(host.now), *host.env.restart(host.now)])
    assert host.processes["s1"].stops == 1
    assert [p.server for p in host.staying()] == ["s0", "s2"]
    host.ready("s2")
    assert host.processes["s0"].drained


def test_a_rolling_restart_waits_while_a_new_server_is_not_ready() -> None:
    host = Host(replicas=2).start().all_ready()
    host.obey(host.env.restart(host.now))
    host.end("s0", "signal SIGKILL")
    host.wait(30)
    assert host.launched() == ["s0", "s1", "s2"]
    host.ready("s2")
    assert host.launched()[-1] == "s3"


def test_a_server_that_somebody_drains_is_replaced_before_it_ends() -> None:
    host = Host(replicas=1).start().all_ready()
    host.processes["s0"].state = "draining"
    host.wait(3)
    assert host.launched() == ["s0", "s1"]
    assert host.states()["s0"] == "draining"
    host.end("s0", "exit code 0")
    host.wait(30)
    assert host.launched() == ["s0", "s1"]


def test_suspect_asked_stuck_replaced() -> None:
    host = Host(replicas=1).start().all_ready()
    host.wait(10, beating=False)
    assert host.states() == {"s0": "suspect"}
    assert host.processes["s0"].asked == 1
    host.wait(49, beating=False)
    assert host.processes["s0"].asked > 10
    assert host.processes["s0"].stops == 0
    host.wait(1, beating=False)
    assert host.states() == {"s0": "stuck"}
    assert host.processes["s0"].stops == 2, "asked to stop, rollouts cancelled"
    host.wait(10, beating=False)
    assert host.processes["s0"].killed
    host.end("s0", "signal SIGKILL")
    host.wait(2)
    assert host.launched() == ["s0", "s1"]
    assert any("no heartbeat for 60 s; signal SIGKILL" in note for note in host.notes)


def test_an_answer_or_a_beat_clears_a_suspect() -> None:
    host = Host(replicas=1).start().all_ready()
    host.wait(30, beating=False)
    host.env.heard("s0", host.now)
    host.wait(5, beating=False)
    assert host.states() == {"s0": "running"}


def test_nobody_is_suspect_while_nats_is_away() -> None:
    """P24, P10."""
    host = Host(replicas=2).start().all_ready()
    for _ in range(600):
        host.env.outage(1)
        host.wait(1, beating=False)
    assert set(host.states().values()) == {"running"}
    assert len(host.launches) == 2


def test_stop_ends_all_at_once_and_kills_what_takes_too_long() -> None:
    """P20."""
    host = Host(replicas=2).start()
    host.ready("s0")
    host.obey(host.env.stop(host.now))
    assert [p.stops for p in host.processes.values()] == [1, 1]
    host.obey(host.env.hurry())
    assert [p.stops for p in host.processes.values()] == [2, 2]
    host.end("s0", "exit code 0")
    host.wait(STOP_LIMIT_S - 1)
    assert not host.processes["s1"].killed
    host.wait(1)
    assert host.processes["s1"].killed
    host.end("s1")
    host.wait(1000)
    assert len(host.launches) == 2


def test_orders_after_a_stop_do_nothing() -> None:
    host = Host(replicas=1).start().all_ready()
    host.obey(host.env.stop(host.now))
    host.obey([*host.env.scale(5, host.now), *host.env.restart(host.now)])
    assert len(host.launches) == 1


def test_adopted_servers_start_no_doubles() -> None:
    host = Host(replicas=3)
    for number, slot in enumerate((0, 2)):
        adopt(host, f"old{number}", slot=slot)
    host.start()
    assert [launch.slot for _, launch in host.launches] == [1]
    host.ready("old0", "old1", "s0")
    assert host.env.ready_count == 3
    assert {p.server for p in host.staying()} == {"old0", "old1", "s0"}


def test_adopted_servers_beyond_the_wanted_ones_are_drained() -> None:
    host = Host(replicas=1)
    adopt(host, "old0", slot=0)
    adopt(host, "old1", slot=1)
    host.start()
    assert host.launches == []
    assert (host.processes["old1"].drained, host.processes["old1"].stops) == (True, 0)


def test_adopted_servers_of_another_description_are_replaced_in_a_rolling_restart() -> None:
    host = Host(replicas=2)
    adopt(host, "old0", slot=0, is_wanted=False)
    adopt(host, "old1", slot=1, is_wanted=True)
    host.start()
    host.ready("old0", "old1")
    while host.env.is_restarting:
        assert len([p for p in host.staying() if p.state == "ready"]) >= 2
        host.all_ready()
    assert {p.server for p in host.staying()} == {"s0", "s1"}


def test_a_rolling_restart_goes_on_after_adoption() -> None:
    host = Host(replicas=1)
    adopt(host, "old", slot=0, generation=3)
    adopt(host, "successor", slot=0, generation=4)
    host.start()
    assert host.launches == []
    host.ready("old")
    host.ready("successor")
    assert host.processes["old"].drained
    assert [p.server for p in host.staying()] == ["successor"]


def adopt(host: Host, server: str, *, slot: int, generation: int = 0, is_wanted: bool = True) -> None:
    from supervision_stage import Process

    host.processes[server] = Process(server, slot, generation)
    host.obey(host.env.adopt(server, slot=slot, generation=generation, is_wanted=is_wanted, now=host.now))
