"""The fleet view: tables of beats and times, and what must hold for any of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fleet_beats import beat, controller_beat, process
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from envbus.bus.control_messages import EnvReport
from envbus.bus.messages import Gone
from envbus.cli.top_screen import History, ScreenState, rows_of, screen
from envbus.controller.fleet import Fleet
from envbus.controller.fleet_views import PRESENT, FleetView

ROUNDING_S = 1e-9


def state_of(view: FleetView, server: str = "a1") -> str | None:
    found = view.server(server)
    return found.state if found else None


@pytest.mark.parametrize(
    ("fields", "silent_s", "state"),
    [
        ({"state": "loading"}, 0, "loading"),
        ({"state": "loading", "loop_lag_s": 60.0}, 0, "loading"),
        ({"state": "ready"}, 0, "ready"),
        ({"state": "full"}, 0, "full"),
        ({"state": "ready", "loop_lag_s": 1.5}, 0, "lagging"),
        ({"state": "full", "loop_lag_s": 1.5}, 0, "lagging"),
        ({"state": "ready"}, 2.9, "ready"),
        ({"state": "ready"}, 3.1, "suspect"),
        ({"state": "loading"}, 3.1, "suspect"),
        ({"state": "ready", "interval_s": 5.0}, 14.0, "ready"),
        ({"state": "ready", "interval_s": 5.0}, 16.0, "suspect"),
        ({"state": "ready", "interval_s": 1e9}, 3.1, "suspect"),
        ({"state": "ready", "interval_s": float("nan")}, 3.1, "suspect"),
        ({"state": "ready"}, 29.0, "suspect"),
        ({"state": "ready"}, 31.0, "gone"),
        ({"state": "draining"}, 0, "draining"),
        ({"state": "stopping"}, 0, "draining"),
        ({"state": "draining"}, 3.1, "gone"),
        ({"state": "failed", "error": "boom"}, 20.0, "failed"),
        ({"state": "ready"}, 61.0, None),
        ({"state": "failed"}, 31.0, None),
    ],
)
def test_what_a_server_says_and_how_long_it_has_been_silent(
    fields: dict[str, Any], silent_s: float, state: str
) -> None:
    """P08: a loop that lags is lagging, and silence makes suspect, not dead at once."""
    fleet = Fleet()
    fleet.server_beat(beat(**fields), 100.0)
    assert state_of(fleet.view(100.0 + silent_s)) == state


@pytest.mark.parametrize(
    ("reported", "state"),
    [
        ("running", "ready"),
        ("suspect", "suspect"),
        ("stuck", "suspect"),
        ("ended", "gone"),
        ("backoff", "failed"),
        ("failed", "failed"),
    ],
)
def test_what_the_controller_says_counts_at_once(reported: str, state: str) -> None:
    fleet = Fleet()
    fleet.server_beat(beat(), 100.0)
    fleet.controller_beat(controller_beat(processes=[process(state=reported, last_exit="exit code 3")]), 100.1)
    assert state_of(fleet.view(100.2)) == state


@pytest.mark.parametrize(
    ("reported", "state"),
    [
        ("starting", "loading"),
        ("running", "loading"),
        ("stuck", "suspect"),
        ("backoff", "failed"),
        ("failed", "failed"),
    ],
)
def test_a_server_that_never_beat_is_known_from_its_controller(reported: str, state: str) -> None:
    """P17: an env that does not load is shown with its exit and the last lines of its log."""
    fleet = Fleet()
    last_exit = "exit code 1: ImportError: no module foo"
    reports = [process("b2", state=reported, pid=None, restarts=2, last_exit=last_exit)]
    fleet.controller_beat(controller_beat(processes=reports), 100.0)
    view = fleet.view(100.0)
    server = view.server("b2")
    assert server is not None
    assert (server.state, server.restarts, server.controller, server.host) == (state, 2, "c1", "h1")
    if state == "failed":
        assert "no module foo" in view.envs[0].problems[0]


def test_news_of_an_end_count_at_once_and_a_late_beat_does_not_revive() -> None:
    fleet = Fleet()
    fleet.server_beat(beat(), 100.0)
    fleet.gone(Gone(server="a1", reason="signal SIGKILL"), 100.5, env="gsm8k")
    fleet.server_beat(beat(), 100.6)
    view = fleet.view(100.7)
    assert state_of(view) == "gone"
    assert view.servers[0].problem == "signal SIGKILL"
    assert view.totals.servers == 0
    fleet.server_beat(beat(), 103.0)
    assert state_of(fleet.view(103.0)) == "ready", "it was wrong news"


def test_a_new_process_with_an_old_id_is_a_new_server() -> None:
    fleet = Fleet()
    fleet.server_beat(beat(done=100), 100.0)
    fleet.gone(Gone(server="a1"), 100.5, env="gsm8k")
    fleet.server_beat(beat(started_at=1001.0, done=0), 100.6)
    view = fleet.view(100.6)
    assert state_of(view) == "ready"
    assert view.servers[0].rate_per_s is None


def test_clocks_stand_still_while_the_viewer_is_cut_off() -> None:
    """P24: nobody is declared dead for beats missed while the bus itself was away."""
    fleet = Fleet()
    fleet.server_beat(beat(), 100.0)
    fleet.controller_beat(controller_beat(), 100.0)
    fleet.cut_off(101.0)
    view = fleet.view(200.0)
    assert view.cut_off
    assert (state_of(view), view.controllers[0].state) == ("ready", "up")
    fleet.back(200.0)
    assert state_of(fleet.view(204.9)) == "ready", "the others may need a moment to be back too"
    assert state_of(fleet.view(206.0)) == "ready"
    assert state_of(fleet.view(208.0)) == "suspect"


def test_a_second_outage_right_after_the_first() -> None:
    fleet = Fleet()
    fleet.server_beat(beat(), 100.0)
    fleet.cut_off(101.0)
    fleet.back(111.0)
    fleet.cut_off(112.0)
    fleet.back(150.0)
    assert state_of(fleet.view(156.9)) == "ready"
    assert state_of(fleet.view(158.1)) == "suspect"


def test_rates_come_from_counts() -> None:
    fleet = Fleet()
    fleet.server_beat(beat(done=10, failed=2, sent_at=1000.0), 100.0)
    assert fleet.view(100.0).servers[0].rate_per_s is None
    fleet.server_beat(beat(done=25, failed=5, sent_at=1002.0), 100.1)
    view = fleet.view(100.2)
    assert view.servers[0].rate_per_s == pytest.approx(9.0), "by the server's clock, whenever the beats arrive"
    assert view.envs[0].totals.rate_per_s == pytest.approx(9.0)
    for second in range(3, 30):
        fleet.server_beat(beat(done=25, failed=5, sent_at=1000.0 + second), 100.0 + second)
    assert fleet.view(130.0).servers[0].rate_per_s == 0.0


def test_totals_of_an_env() -> None:
    fleet = Fleet()
    waiting = {"aaaa": 5, "bbbb": 2}
    fleet.server_beat(
        beat("a1", in_flight=3, state="full", waiting_clients=2, waiting_jobs=7, waiting_by_client=waiting,
             failed_by_type={"ToolError": 1}, failed=1, oldest_job_s=4.0, host="h2"), 100.0)  # fmt: skip
    fleet.server_beat(
        beat("a2", in_flight=1, waiting_clients=2, waiting_jobs=5, waiting_by_client={"aaaa": 4, "cccc": 1},
             failed_by_type={"ToolError": 2}, failed=2, loop_lag_s=0.5), 100.0)  # fmt: skip
    fleet.server_beat(beat("a3", state="draining", in_flight=2, waiting_jobs=99), 100.0)
    fleet.server_beat(beat("a4", state="loading", slots=8), 100.0)
    fleet.controller_beat(controller_beat("c1"), 100.0)
    fleet.controller_beat(controller_beat("c2", envs=[EnvReport(env="gsm8k", env_id="gsm8k", replicas=1)]), 100.0)
    env = fleet.view(100.0).env("gsm8k")
    assert env is not None
    totals = env.totals
    assert (totals.servers, totals.slots, totals.in_flight) == (4, 8, 6)
    assert (totals.waiting_clients, totals.waiting_jobs) == (3, 8), "each client tells every server: no sum"
    assert (totals.oldest_job_s, totals.lag_s, totals.failed) == (4.0, 0.5, 3)
    assert env.failed_by_type == {"ToolError": 3}
    assert env.wanted == 3
    assert env.hosts == ("h1", "h2")
    assert env.states == {"draining": 1, "full": 1, "loading": 1, "ready": 1}


def test_mixed_versions_and_fingerprints_are_flagged() -> None:
    fleet = Fleet()
    fleet.server_beat(beat("a1", versions={"envbus": "1", "env": "2"}), 100.0)
    fleet.server_beat(beat("a2", versions={"envbus": "1", "env": "3"}, fingerprint="f2"), 100.0)
    env = fleet.view(100.0).envs[0]
    assert env.mixed == ("fingerprint", "env")
    assert env.versions == {"env": ("2", "3"), "envbus": ("1",)}
    fleet.gone(Gone(server="a1"), 100.1, env="gsm8k")
    assert fleet.view(100.2).envs[0].mixed == ()


def test_an_env_without_servers_is_shown_while_a_controller_wants_it() -> None:
    fleet = Fleet()
    envs = [EnvReport(env="gsm8k", env_id="gsm8k", replicas=2, failed="given up: exit code 1")]
    fleet.controller_beat(controller_beat(envs=envs), 100.0)
    view = fleet.view(103.5)
    assert (view.envs[0].wanted, view.envs[0].totals.servers) == (2, 0)
    assert view.envs[0].problems == ("given up: exit code 1",)
    assert view.controllers[0].state == "suspect"
    assert fleet.view(131.0).envs == ()
    assert fleet.view(131.0).controllers[0].state == "gone"
    assert fleet.view(161.0).controllers == ()


def test_news_of_an_end_count_for_the_env_of_their_subject_only() -> None:
    fleet = Fleet()
    fleet.server_beat(beat(), 100.0)
    fleet.gone(Gone(server="a1"), 100.1, env="other")
    fleet.gone(Gone(server="unknown"), 100.1, env="gsm8k")
    assert state_of(fleet.view(100.2)) == "ready"


numbers = st.one_of(st.floats(), st.just(float("nan")), st.integers(-(10**18), 10**18).map(float))
counts = st.integers(-(2**63), 2**63 - 1)


@given(numbers, numbers, numbers, counts, st.text(max_size=500))
def test_numbers_of_strangers_can_be_added_up_and_shown(
    lag_s: float, sent_at: float, started_at: float, count: int, text: str
) -> None:
    fleet = Fleet()
    for _ in range(2):
        fields: dict[str, Any] = {
            "loop_lag_s": lag_s, "oldest_job_s": lag_s, "started_at": started_at, "sent_at": sent_at, "done": count,
            "slots": count, "in_flight": count, "waiting_jobs": count, "host": text, "interval_s": sent_at,
        }  # fmt: skip
        fleet.server_beat(beat(**fields), 100.0, wall=1.0)
    view = fleet.view(100.0)
    assert json.loads(json.dumps(view.as_json(), allow_nan=False))
    rows = rows_of(view, "lag")
    history = History()
    history.sample(rows)
    drawn = screen(view, rows, history, ScreenState(selected=rows[-1].key), width=80, height=24, where="").plain
    assert all(cell_len(line) <= 80 for line in drawn.split("\n"))


events = st.lists(
    st.tuples(
        st.sampled_from(["beat", "gone", "controller", "cut", "back", "look"]),
        st.sampled_from(["a1", "a2", "a3"]),
        st.sampled_from(["loading", "ready", "full", "draining", "stopping", "failed"]),
        st.floats(0, 20),
    ),
    max_size=40,
)


@given(events)
def test_no_order_of_events_breaks_the_view(history: list[tuple[str, str, str, float]]) -> None:
    fleet, now = Fleet(), 100.0
    last_clock = float("-inf")
    for kind, server, state, pause in history:
        now += pause
        match kind:
            case "beat":
                fleet.server_beat(beat(server, state=state, in_flight=2, done=int(now), sent_at=now), now)
            case "gone":
                fleet.gone(Gone(server=server), now, env="gsm8k")
            case "controller":
                reports = [process(server, state="backoff" if state == "failed" else "running")]
                fleet.controller_beat(controller_beat(processes=reports), now)
            case "cut":
                fleet.cut_off(now)
            case "back":
                fleet.back(now)
        view = fleet.view(now)
        clock = fleet._clock(now)
        assert clock >= last_clock - ROUNDING_S, "no clock runs backwards"
        last_clock = clock
        assert sum(sum(env.states.values()) for env in view.envs) == len(view.servers)
        assert view.totals.servers == sum(server.state in PRESENT for server in view.servers)
        for each in view.servers:
            assert each.silent_s is None or each.silent_s >= 0
            assert each.rate_per_s is None or each.rate_per_s >= 0
            assert each.state != "gone" or each.in_flight == 0
        view.as_json()
