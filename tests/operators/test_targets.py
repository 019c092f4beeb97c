"""What an operator's words stand for, and how servers are shared out."""

from __future__ import annotations

import pytest
from fleet_beats import beat, controller_beat
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.control_messages import EnvReport
from envbus.controller.fleet import Fleet
from envbus.controller.fleet_views import FleetView
from envbus.controller.targets import controllers_of, find_env, find_target, one_server, require_env, spread
from envbus.errors import NoServerError, UsageError


@pytest.fixture
def view() -> FleetView:
    fleet = Fleet()
    fleet.server_beat(beat("aa11", "gsm8k", host="h1"), 0.0)
    fleet.server_beat(beat("aa22", "gsm8k", host="h2"), 0.0)
    fleet.server_beat(beat("bb33", "x~1", host="h1", env_id="x"), 0.0)
    fleet.server_beat(beat("bb44", "x~2", host="h1", env_id="x"), 0.0)
    fleet.server_beat(beat("cc55", "y~1", host="gsm8k", env_id="y"), 0.0)
    fleet.server_gone("bb44", 0.5)
    fleet.controller_beat(controller_beat("c1", host="h1"), 0.0)
    fleet.controller_beat(controller_beat("c2", host="h3"), 0.0)
    return fleet.view(1.0)


@pytest.mark.parametrize(
    ("text", "kind", "servers"),
    [
        ("gsm8k", "env", ["aa11", "aa22"]),
        ("h1", "host", ["aa11", "bb33"]),
        ("h3", "host", []),
        ("aa1", "server", ["aa11"]),
        ("bb", "server", ["bb33"]),
        ("y", "env", ["cc55"]),
        ("x~2", "env", []),
    ],
)
def test_env_then_host_then_the_start_of_an_id(view: FleetView, text: str, kind: str, servers: list[str]) -> None:
    target = find_target(view, text)
    assert (target.kind, [server.server for server in target.servers]) == (kind, servers)


def test_what_does_not_fit_says_what_would(view: FleetView) -> None:
    with pytest.raises(UsageError, match=r"'aa' is the start of 2 server ids: aa11 \(ready on h1\)"):
        find_target(view, "aa")
    with pytest.raises(UsageError, match="x~1, x~2"):
        find_env(view, "x")
    with pytest.raises(NoServerError, match=r"envs: gsm8k.*did you mean 'gsm8k'"):
        require_env(view, "gsmk8")
    with pytest.raises(NoServerError, match="check the address and --prefix"):
        find_target(Fleet().view(0.0), "x")
    with pytest.raises(UsageError, match="has 2 servers"):
        one_server(view, "gsm8k")


def test_logs_reach_a_server_that_has_ended(view: FleetView) -> None:
    found = one_server(view, "bb4")
    assert found is not None
    assert found.state == "gone"


def test_logs_of_an_env_are_those_of_its_one_failed_server() -> None:
    fleet = Fleet()
    for name, state in (("aa", "ready"), ("bb", "failed"), ("cc", "ready")):
        fleet.server_beat(beat(name, state=state), 0.0)
    found = one_server(fleet.view(1.0), "gsm8k")
    assert found is not None
    assert found.server == "bb"
    fleet.server_beat(beat("dd", state="failed"), 0.0)
    with pytest.raises(UsageError, match="has 4 servers"):
        one_server(fleet.view(1.0), "gsm8k")


def test_controllers_of_an_env(view: FleetView) -> None:
    assert [each.controller for each in controllers_of(view, "gsm8k")] == ["c1", "c2"]
    assert [each.controller for each in controllers_of(view, "gsm8k", host="h3")] == ["c2"]
    with pytest.raises(NoServerError, match="the hosts that do: h1, h3"):
        controllers_of(view, "gsm8k", host="h2")
    with pytest.raises(NoServerError, match="no controller runs env 'x~1': start it with envbus up"):
        controllers_of(view, "x~1")


@pytest.mark.parametrize(
    ("total", "current", "shares"),
    [
        (5, {"a": 3}, {"a": 5}),
        (5, {"a": 0, "b": 3}, {"a": 2, "b": 3}),
        (4, {"a": 4, "b": 0}, {"a": 2, "b": 2}),
        (1, {"a": 1, "b": 1, "c": 2}, {"a": 0, "b": 0, "c": 1}),
        (0, {"a": 1, "b": 1}, {"a": 0, "b": 0}),
    ],
)
def test_servers_are_shared_evenly(total: int, current: dict[str, int], shares: dict[str, int]) -> None:
    assert spread(total, current) == shares


@given(st.integers(0, 1000), st.dictionaries(st.text(max_size=3), st.integers(0, 50), min_size=1, max_size=8))
def test_shares_add_up_and_differ_by_one(total: int, current: dict[str, int]) -> None:
    shares = spread(total, current)
    assert sum(shares.values()) == total
    assert max(shares.values()) - min(shares.values()) <= 1
    assert spread(total, shares) == shares, "asking again changes nothing"


def test_an_env_report_of_another_env_is_no_match() -> None:
    fleet = Fleet()
    fleet.controller_beat(controller_beat(envs=[EnvReport(env="other", env_id="other", replicas=1)]), 0.0)
    with pytest.raises(NoServerError):
        controllers_of(fleet.view(0.0), "gsm8k")
