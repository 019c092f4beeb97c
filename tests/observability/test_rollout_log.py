"""What a server remembers of ended rollouts: exact counts, bounded names, the last few."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.messages import DURATION_BOUNDS_S
from envbus.server.rollout_log import MAX_ERROR_TYPES, MAX_RECENT, OTHER_TYPES, EndedRollout, RolloutLog, ended_rollout


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ({"example_id": 7, "reward": 0.5, "timing": {"total_s": 2.0}}, EndedRollout("7", 0.5, None, 2.0)),
        ({"example_id": "a", "reward": 1, "error": None}, EndedRollout("a", 1.0, None, 9.0)),
        ({"reward": float("nan"), "timing": {"total_s": float("inf")}}, EndedRollout("?", None, None, 9.0)),
        ({"reward": "high", "timing": "long"}, EndedRollout("?", None, None, 9.0)),
        ({"reward": 1.0, "error": {"error": "KeyError"}}, EndedRollout("?", None, "KeyError", 9.0)),
        ({"error": "it broke"}, EndedRollout("?", None, "str", 9.0)),
        ({"timing": {"total_s": -1}}, EndedRollout("?", None, None, 0.0)),
    ],
)
def test_outputs_of_any_environment_are_read(output: dict[str, Any], expected: EndedRollout) -> None:
    assert ended_rollout(output, job_s=9.0) == expected


def test_long_names_are_cut() -> None:
    ended = ended_rollout({"example_id": "x" * 1000, "error": {"error": "E" * 1000}}, job_s=0)
    assert len(ended.example_id) == len(ended.error or "") == 64


def test_recent_ones_are_taken_once_and_are_the_last() -> None:
    log = RolloutLog()
    log.add([EndedRollout(str(number), 1.0, None, 0.12345) for number in range(9)], "0123456789abcdef")
    taken = log.take_recent()
    assert [rollout.example_id for rollout in taken] == [str(number) for number in range(9 - MAX_RECENT, 9)]
    assert {rollout.client for rollout in taken} == {"01234567"}
    assert taken[0].duration_s == 0.123
    assert log.take_recent() == []


def test_types_of_errors_are_bounded_and_none_is_lost() -> None:
    log = RolloutLog()
    log.add([EndedRollout("e", None, f"E{number}", 0.0) for number in range(100)] * 2, "c")
    assert len(log.failed_by_type) == MAX_ERROR_TYPES + 1
    assert log.failed_by_type[OTHER_TYPES] == 2 * (100 - MAX_ERROR_TYPES)
    assert log.failed_by_type.total() == 200


@given(st.lists(st.floats(0, 1e6)))
def test_each_duration_is_in_one_bucket(durations: list[float]) -> None:
    log = RolloutLog()
    log.add([EndedRollout("e", None, None, duration) for duration in durations], "c")
    assert sum(log.duration_counts) == len(durations)
    for index, bound in enumerate(DURATION_BOUNDS_S):
        assert sum(log.duration_counts[: index + 1]) == sum(duration <= bound for duration in durations)
