"""What a 503 means for a server, by where it and the client are connected (CASES P01, P12)."""

from __future__ import annotations

import pytest

from envbus.client.suspects import CONFIRM_S, RETURN_S, Suspects

HERE, THERE = "NHERE", "NTHERE"


def make(**nodes: str | None) -> Suspects:
    """Servers by name, each heard once at 0 from its node."""
    suspects = Suspects()
    for server, node in nodes.items():
        suspects.heard(server, node, 0.0)
    return suspects


def gone_after(suspects: Suspects, server: str, *, since: float = 1.0) -> float | None:
    """Seconds of nothing but 503s, one every 0.1 s, until the server counts as gone."""
    for step in range(100):
        if suspects.nobody(server, own_node=HERE, now=since + step / 10):
            return step / 10
    return None


@pytest.mark.parametrize(("node", "expected_s"), [(HERE, CONFIRM_S), (THERE, RETURN_S), (None, RETURN_S)])
def test_how_long_only_503s_must_come(node: str | None, expected_s: float) -> None:
    """Only on the client's own node the way to the server is known to be there."""
    assert gone_after(make(s=node), "s") == pytest.approx(expected_s, abs=0.11)


def test_a_first_503_is_never_enough_but_one_of_an_ended_process_is() -> None:
    suspects = make(s=HERE)
    assert not suspects.nobody("s", own_node=HERE, now=1.0)
    assert suspects.servers() == {"s"}
    suspects.ended("s")
    assert suspects.nobody("s", own_node=HERE, now=1.0)


def test_a_neighbour_that_answers_vouches_for_its_node() -> None:
    """From then on; an answer from before the first 503 says nothing, nor does one from another node."""
    assert gone_after(make(s=THERE, t=THERE), "s") == pytest.approx(RETURN_S, abs=0.11)
    for node, expected_s in ((THERE, CONFIRM_S), (HERE, RETURN_S)):
        suspects = make(s=THERE, t=THERE)
        assert not suspects.nobody("s", own_node=HERE, now=1.0)
        suspects.heard("t", node, 1.05)
        assert gone_after(suspects, "s", since=1.0) == pytest.approx(expected_s, abs=0.11)


def test_an_answer_ends_the_suspicion_and_tells_of_a_new_node() -> None:
    suspects = make(s=THERE)
    suspects.nobody("s", own_node=HERE, now=1.0)
    suspects.heard("s", HERE, 2.0)
    assert not suspects.servers()
    assert gone_after(suspects, "s", since=3.0) == pytest.approx(CONFIRM_S, abs=0.11)


def test_after_an_outage_of_its_own_a_client_starts_anew_and_later() -> None:
    """P24: what it heard before does not count, and servers need a moment to be back."""
    suspects = make(s=HERE)
    suspects.nobody("s", own_node=HERE, now=1.0)
    suspects.reconnected(deaf_until=5.0)
    assert not suspects.servers()
    assert gone_after(suspects, "s", since=4.0) == pytest.approx(1.0 + CONFIRM_S, abs=0.11)


def test_servers_without_jobs_are_forgotten() -> None:
    suspects = make(s=THERE, t=HERE)
    suspects.nobody("s", own_node=HERE, now=1.0)
    suspects.ended("s")
    suspects.keep_only(["t"])
    assert not suspects.servers()
    assert gone_after(suspects, "s") == pytest.approx(RETURN_S, abs=0.11)
    assert gone_after(suspects, "t") == pytest.approx(CONFIRM_S, abs=0.11)


def test_a_server_that_speaks_has_not_ended_whatever_was_told() -> None:
    """Anybody may say that a process ended; a 503 of a later cut is no proof then."""
    suspects = make(s=HERE)
    suspects.ended("s")
    suspects.heard("s", HERE, 1.0)
    assert not suspects.nobody("s", own_node=HERE, now=2.0)
