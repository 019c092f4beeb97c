"""What keeps a flood cheap: few answers, few log lines, a line with an end."""

from __future__ import annotations

import logging

import pytest

from envbus.notices import EVERY_S, Notices
from envbus.server.allowance import AT_ONCE, PER_S, Allowance
from envbus.server.line import MAX_WAITERS, Line

log = logging.getLogger("envbus.test_flood_limits")


def take(allowance: Allowance, count: int, now: float) -> int:
    return sum(allowance.take(now) for _ in range(count))


def test_an_allowance_is_so_many_at_once_and_so_many_a_second() -> None:
    allowance = Allowance()
    assert take(allowance, 10_000, 50.0) == AT_ONCE
    assert take(allowance, 10_000, 50.5) == PER_S / 2
    assert take(allowance, 10_000, 51.5) == PER_S
    assert take(allowance, 10_000, 1000.0) == AT_ONCE


def test_the_first_of_a_kind_is_logged_at_once_then_sums(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(log)
    for number in range(1000):
        notices.note("bad", f"bad message {number}", 0.0)
    notices.note("worse", "a worse one", 1.0, error=ValueError("why"))
    notices.tick(EVERY_S - 0.1)
    assert [record.getMessage() for record in caplog.records] == ["bad message 0", "a worse one"]
    assert caplog.records[1].exc_info is not None
    caplog.clear()
    notices.tick(EVERY_S)
    assert [record.getMessage() for record in caplog.records] == ["bad message 999 (the last of 999 such in 10 s)"]
    caplog.clear()
    notices.tick(3 * EVERY_S)
    notices.note("bad", "bad again", 3 * EVERY_S)
    assert [record.getMessage() for record in caplog.records] == ["bad again"]


def test_a_line_has_an_end_and_room_again_when_somebody_leaves() -> None:
    line = Line()
    for number in range(MAX_WAITERS + 5):
        line.put(f"c{number}", inbox="i", jobs=1, priority=0, now=0.0)
    assert (len(line), line.turned_away) == (MAX_WAITERS, 5)
    line.put("c0", inbox="i", jobs=9, priority=0, now=1.0)
    line.remove("c1")
    line.put("late", inbox="i", jobs=1, priority=0, now=1.0)
    assert (len(line), line.jobs, line.turned_away) == (MAX_WAITERS, MAX_WAITERS + 8, 5)


def test_turns_leave_out_those_that_are_held_back() -> None:
    line = Line()
    for client in ("a", "b"):
        line.put(client, inbox=client, jobs=2, priority=0, now=0.0)
    assert [line.next(without={"a"}) for _ in range(3)] == [("b", "b"), ("b", "b"), None]
    assert not line.has_turn(without={"a"})
    assert line.has_turn()
    assert line.next() == ("a", "a")
