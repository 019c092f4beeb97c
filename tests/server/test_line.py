"""The waiting line: whose turn it is (CASES P15)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.server.line import Line


def put(line: Line, client: str, jobs: int, *, priority: int = 0, now: float = 0.0) -> None:
    line.put(client, inbox=f"inbox.{client}", jobs=jobs, priority=priority, now=now)


def turns(line: Line, count: int) -> list[str]:
    return [turn[0] for _ in range(count) if (turn := line.next())]


def test_an_empty_line_has_no_turn() -> None:
    assert Line().next() is None


def test_clients_take_turns_whatever_their_backlog() -> None:
    line = Line()
    put(line, "big", 1000)
    put(line, "small", 3)
    assert turns(line, 8) == ["big", "small", "big", "small", "big", "small", "big", "big"]


def test_a_client_leaves_when_its_jobs_are_served() -> None:
    line = Line()
    put(line, "a", 2)
    assert turns(line, 5) == ["a", "a"]
    assert len(line) == 0


def test_saying_it_again_keeps_the_place_and_updates_the_rest() -> None:
    line = Line()
    put(line, "a", 5)
    put(line, "b", 5)
    line.put("a", inbox="new", jobs=7, priority=0, now=1.0)
    assert line.next() == ("a", "new")
    assert line.jobs == 11


def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    line = Line()
    put(line, "a", 5)
    put(line, "b", 5)
    line.next()
    put(line, "c", 5)
    assert turns(line, 3) == ["b", "a", "c"]


def test_higher_priority_goes_first() -> None:
    line = Line()
    put(line, "low", 9)
    put(line, "high", 2, priority=1)
    assert turns(line, 3) == ["high", "high", "low"]


@pytest.mark.parametrize("leave", [lambda line: put(line, "a", 0), lambda line: line.remove("a"), Line.clear])
def test_ways_off_the_line(leave: object) -> None:
    line = Line()
    put(line, "a", 5)
    leave(line)  # type: ignore[operator]
    assert line.next() is None
    assert line.jobs == 0


def test_leaving_without_being_there_is_harmless() -> None:
    line = Line()
    put(line, "a", 0)
    line.remove("b")
    assert len(line) == 0


def test_silent_clients_are_forgotten() -> None:
    line = Line()
    put(line, "old", 1, now=1.0)
    put(line, "new", 1, now=5.0)
    line.forget_silent(3.0, only="new")
    assert len(line) == 2
    line.forget_silent(3.0)
    assert turns(line, 2) == ["new"]


@given(backlogs=st.lists(st.integers(min_value=20, max_value=1000), min_size=2, max_size=6), grants=st.integers(1, 120))
def test_turns_of_clients_that_always_wait_differ_by_at_most_one(backlogs: list[int], grants: int) -> None:
    line = Line()
    for number, jobs in enumerate(backlogs):
        put(line, str(number), jobs)
    count = min(grants, 20 * len(backlogs))
    served = Counter({str(number): 0 for number in range(len(backlogs))})
    served.update(turns(line, count))
    assert max(served.values()) - min(served.values()) <= 1
    assert served.total() == count
