"""Who holds how much of a server's memory for results, and what may leave while it is short (CASES P33)."""

from __future__ import annotations

import pytest

from envbus.server.holdings import MAX_HELD, Holdings

MAX_BYTES = 1000
HOLD_S = 600.0
QUIET_S = 10.0


def holding(**sizes: int) -> Holdings:
    """One outcome per client of this name."""
    held = Holdings(max_bytes=MAX_BYTES, hold_s=HOLD_S, quiet_s=QUIET_S)
    for client, size_bytes in sizes.items():
        held.put(client, client, size_bytes=size_bytes, is_failure=False, now=0.0)
    return held


@pytest.mark.parametrize(
    ("sizes", "is_full", "heavy"),
    [
        ({}, False, set()),
        ({"a": 499}, False, set()),
        ({"a": 500}, False, {"a"}),
        ({"a": 499, "b": 500}, False, {"b"}),
        ({"a": 500, "b": 500}, True, {"a", "b"}),
        ({"a": 400, "b": 400, "c": 400}, True, set()),
        ({"a": 5000}, True, {"a"}),
    ],
)
def test_the_budget_and_each_clients_half_of_it(sizes: dict[str, int], is_full: bool, heavy: set[str]) -> None:
    held = holding(**sizes)
    assert (held.is_full, held.heavy_clients) == (is_full, heavy)
    for client in sizes:
        held.drop(client)
    assert (held.is_full, held.heavy_clients, held.size_bytes, len(held), held._shares) == (False, set(), 0, 0, {})


def test_many_small_outcomes_are_too_many_too() -> None:
    held = Holdings(max_bytes=2**40, hold_s=HOLD_S, quiet_s=QUIET_S)
    for number in range(MAX_HELD):
        assert not held.is_full
        assert held.heavy_clients == (set() if number < MAX_HELD // 2 else {"c"})
        held.put(str(number), "c", size_bytes=1, is_failure=True, now=0.0)
    assert held.is_full


def test_who_was_heavy_is_told_as_of_then() -> None:
    held = holding(a=500)
    heavy = held.heavy_clients
    held.drop("a")
    assert (heavy, held.heavy_clients) == ({"a"}, set())


def test_what_is_put_in_place_of_an_outcome_is_counted_alone() -> None:
    held = holding(a=600)
    held.put("a", "a", size_bytes=7, is_failure=True, now=5.0)
    assert (len(held), held.size_bytes, held.heavy_clients) == (1, 7, set())
    assert held.overdue(604.0) == []
    assert held.overdue(605.0) == [("a", True)]


def test_while_memory_is_not_short_nothing_is_let_go() -> None:
    held = holding(a=499, b=499)
    held.sent("a", 0.0)
    assert held.let_go(500.0) == []


def test_only_what_was_sent_whole_is_let_go() -> None:
    held = holding(whole=600, parts=600, some=600, unsent=600)
    held.sent("whole", 0.0)
    for index in (0, 1, 1, 2):
        held.part_sent("parts", index, of=3, now=0.0)
    for index in (0, 0, 2):
        held.part_sent("some", index, of=3, now=0.0)
    assert held.let_go(QUIET_S - 0.1) == []
    assert held.let_go(QUIET_S) == ["whole", "parts"]
    assert held.let_go(HOLD_S) == []
    assert len(held) == 2


def test_what_is_asked_for_is_kept() -> None:
    """Its client has not had it, though it was sent: the message was lost."""
    held = holding(a=1200)
    held.sent("a", 0.0)
    for second in range(1, 100):
        held.asked("a", float(second))
        assert held.let_go(second + 5.0) == []
    assert held.let_go(99.0 + QUIET_S) == ["a"]


def test_no_more_is_let_go_than_it_takes() -> None:
    held = holding(a=400, b=400, c=400)
    for client in "abc":
        held.sent(client, 0.0)
    assert held.let_go(QUIET_S) == ["a"]


def test_an_outage_counts_for_nobody() -> None:
    held = holding(a=1200)
    held.sent("a", 0.0)
    held.shift_clocks(1000.0)
    assert held.let_go(1000.0 + QUIET_S - 0.1) == []
    assert held.overdue(1000.0 + HOLD_S - 0.1) == []
    assert held.let_go(1000.0 + QUIET_S) == ["a"]


def test_words_about_what_is_not_held_are_harmless() -> None:
    held = holding()
    held.sent("x", 0.0)
    held.asked("x", 0.0)
    held.part_sent("x", 0, of=1, now=0.0)
    held.drop("x")
    assert "x" not in held
