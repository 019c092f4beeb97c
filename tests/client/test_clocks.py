"""Servers whose clocks are in doubt: passed over for a while, and forgotten then."""

from __future__ import annotations

from envbus.client.clocks import DOUBT_S, Clocks


def test_a_doubt_is_news_once_and_passes() -> None:
    clocks = Clocks(give_up_s=30.0)
    assert [clocks.refused("s", now) for now in (1.0, 2.0, 2.0 + DOUBT_S)] == [True, False, True]
    assert clocks.is_doubted("s", 3.0 + DOUBT_S)
    assert not clocks.is_doubted("s", 2.0 + 2 * DOUBT_S)


def test_servers_that_never_speak_again_take_no_memory() -> None:
    clocks = Clocks(give_up_s=30.0)
    for number in range(1_000):
        clocks.refused(f"s{number}", number * DOUBT_S)
    assert len(clocks._doubted_until) == 1
