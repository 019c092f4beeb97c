"""What the dashboard remembers and sends: differences of totals, bounded, and always JSON that a browser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_metrics import beat

from envbus.bus.messages import Beat, RecentRollout
from envbus.controller.fleet import Fleet
from envbus.controller.fleet_views import FleetView
from envbus.dashboard.document import MAX_CLIENTS, SHOWN_RECENT, document, encoded
from envbus.dashboard.history import MAX_RECENT, RATE_S, WINDOW_S, History

T = 1_000_000.0


class Wall:
    """A fleet and its history under a clock of the test's own."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.history = History()
        self.at = T

    def heard(self, *beats: Beat) -> None:
        for each in beats:
            self.fleet.server_beat(each, self.at)
            self.history.beat(each, self.at)

    def second(self) -> None:
        self.at += 1
        self.history.tick(self.view, self.at)

    @property
    def view(self) -> FleetView:
        return self.fleet.view(self.at)

    def document(self) -> Any:
        data = document(self.view, self.history, at=self.at, points=self.history.points)
        return json.loads(encoded(data), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def rollout(example_id: str = "e", reward: float | None = 1.0, error: str | None = None) -> RecentRollout:
    return RecentRollout(example_id=example_id, reward=reward, error=error, duration_s=1.0, client="c")


def test_what_happened_before_is_not_counted_and_a_restart_counts_anew() -> None:
    wall = Wall()
    wall.heard(beat(done=1000, failed=10))
    assert wall.history.ended() == (0, 0)
    wall.second()
    wall.heard(beat(done=1003, failed=11, failed_by_type={"KeyError": 1}))
    assert wall.history.ended() == (3, 1)
    wall.second()
    wall.heard(beat(done=2, started_at=9.0))
    wall.second()
    wall.heard(beat(done=5, started_at=9.0))
    assert wall.history.ended() == (6, 1)
    assert wall.history.failures() == {("e", "KeyError"): 1}


def test_rates_are_means_over_whole_seconds() -> None:
    wall = Wall()
    done = 0
    for _ in range(10):
        done += 4
        wall.heard(beat(done=done))
        wall.second()
    assert wall.history.points[-1].done_per_s == 4.0
    for _ in range(RATE_S + 1):
        wall.heard(beat(done=done))
        wall.second()
    assert wall.history.points[-1].done_per_s == 0.0


def test_one_point_per_second_and_no_more_than_the_window() -> None:
    wall = Wall()
    for _ in range(WINDOW_S + 50):
        wall.second()
        wall.history.tick(wall.view, wall.at + 0.5)
    assert len(wall.history.points) == WINDOW_S
    times = [point.at for point in wall.history.points]
    assert times == sorted(set(times))


def test_failures_leave_the_window() -> None:
    wall = Wall()
    wall.heard(beat())
    wall.second()
    wall.heard(beat(failed=7, failed_by_type={"KeyError": 7}))
    assert wall.document()["failures"] == [{"env": "e", "type": "KeyError", "count": 7}]
    for _ in range(WINDOW_S + 1):
        wall.heard(beat(failed=7, failed_by_type={"KeyError": 7}))
        wall.second()
    assert wall.document()["failures"] == []
    assert wall.document()["totals"]["failed"] == 0


def test_last_rollouts_come_newest_first_and_are_bounded() -> None:
    wall = Wall()
    for number in range(100):
        wall.heard(beat(recent=[rollout(str(number), 0.5)]))
    assert len(wall.history.recent) == MAX_RECENT
    shown = wall.document()["recent"]
    assert [each["example_id"] for each in shown] == [str(number) for number in range(99, 99 - SHOWN_RECENT, -1)]
    assert wall.document()["envs"][0]["reward"] == 0.5


def test_what_is_gone_is_forgotten() -> None:
    wall = Wall()
    for number in range(20):
        wall.heard(beat(f"s{number}", env=f"e{number}", recent=[rollout()]))
    for _ in range(120):
        wall.second()
    assert wall.view.servers == ()
    assert not wall.history._beats
    assert not wall.history._env_rates
    assert not wall.history._rewards


def test_numbers_and_names_of_strangers_do_not_break_the_page() -> None:
    nan, inf = float("nan"), float("inf")
    wall = Wall()
    odd = {"loop_lag_s": nan, "oldest_job_s": inf, "sent_at": nan, "host": "\ud800", "env": "<b>\ud800"}
    wall.heard(beat(**odd, recent=[rollout("\udfff", nan), rollout("e", inf)]))
    wall.second()
    wall.heard(beat(**odd, done=3))
    wall.second()
    shown = wall.document()
    assert shown["recent"][0]["reward"] is None
    assert shown["servers"][0]["lag_s"] in (None, 0.0)
    assert shown["envs"][0]["env"] == "<b>\ud800"


def test_the_longest_lines_are_shown_and_the_rest_is_counted() -> None:
    wall = Wall()
    wall.heard(beat(waiting_clients=12, waiting_by_client={f"c{number}": number + 1 for number in range(12)}))
    shown = wall.document()
    assert [each["jobs"] for each in shown["clients"]] == list(range(12, 12 - MAX_CLIENTS, -1))
    assert shown["more_clients"] == 12 - MAX_CLIENTS
