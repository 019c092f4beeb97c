"""Which endpoints are left out, decided from outcomes and a clock value."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from envbus.environments.circuits import Circuits


def opened(name: str = "a", *, at_s: float = 0.0) -> Circuits:
    circuits = Circuits(failures_to_open=3, pause_s=10.0)
    assert [circuits.failed(name, at_s) for _ in range(3)] == [False, False, True]
    return circuits


def test_it_takes_a_number_of_failures_in_a_row() -> None:
    circuits = Circuits(failures_to_open=3)
    for _ in range(2):
        assert not circuits.failed("a", 0.0)
        assert not circuits.failed("a", 0.0)
        assert circuits.enter("a", 0.0)
        assert not circuits.answered("a"), "it was never left out"
    assert len(circuits) == 0, "of endpoints that answer nothing is kept"


def test_one_probe_after_each_pause() -> None:
    circuits = opened(at_s=100.0)
    assert circuits.enter("b", 100.0), "others are not touched"
    assert not circuits.enter("a", 109.9)
    assert circuits.is_due("a", 110.0)
    assert circuits.enter("a", 110.0)
    assert not circuits.enter("a", 110.0), "one at a time"
    assert not circuits.is_closed("a")
    assert not circuits.failed("a", 112.0), "it is left out already"
    assert not circuits.enter("a", 121.9)
    assert circuits.enter("a", 122.0)
    assert circuits.answered("a"), "and it is back"
    assert circuits.is_closed("a")
    assert circuits.enter("a", 122.0)


def test_a_probe_whose_end_is_never_told_is_followed_by_another() -> None:
    circuits = opened()
    assert circuits.enter("a", 10.0)
    assert not circuits.enter("a", 19.9)
    assert circuits.enter("a", 20.0)


def test_the_number_of_endpoints_is_bounded() -> None:
    circuits = Circuits(failures_to_open=1, max_endpoints=3)
    for number in range(10):
        circuits.failed(str(number), 0.0)
    assert len(circuits) == 3
    assert [number for number in range(10) if not circuits.is_closed(str(number))] == [7, 8, 9]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["failed", "answered", "enter"]), st.floats(0, 5)), max_size=60))
def test_walks(steps: list[tuple[str, float]]) -> None:
    """Whatever happens: an endpoint left out gets at most one call in a pause, and always one after it."""
    circuits, now_s, in_a_row, last_s = Circuits(failures_to_open=3, pause_s=10.0), 0.0, 0, 0.0
    for act, wait_s in steps:
        now_s += wait_s
        if act == "failed":
            circuits.failed("a", now_s)
            in_a_row, last_s = in_a_row + 1, now_s
        elif act == "answered":
            circuits.answered("a")
            in_a_row = 0
        elif in_a_row < 3:
            assert circuits.enter("a", now_s)
        else:
            entered = circuits.enter("a", now_s)
            assert entered == (now_s >= last_s + 10.0)
            last_s = now_s if entered else last_s
    assert circuits.enter("a", now_s + 10.0)
