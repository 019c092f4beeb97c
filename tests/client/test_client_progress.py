"""Progress as it comes in at a client: in order, whole, once per attempt, and bounded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.codec import encode
from envbus.client import progress as client_progress
from envbus.client.progress import MAX_KEPT_BYTES, EndlessReportError, Incoming, Message, Report
from envbus.client.watch import Watch
from envbus.server.progress import Chunk, ProgressBuffer
from envbus.types import RolloutProgress


def message(seq: int, body: bytes = b"x", *, attempt: int = 1, more: bool = False, ask: bool = False) -> Message:
    return Message(attempt, seq, body, more, ask)


def told(reports: list[Report]) -> list[tuple[int, int, bytes]]:
    return [(report.attempt, report.number, report.body) for report in reports]


def test_messages_in_order_are_reports_at_once() -> None:
    own = Incoming()
    assert told(own.put("s", message(1, b"a"))) == [(1, 1, b"a")]
    assert told(own.put("s", message(2, b"b"))) == [(1, 2, b"b")]


def test_what_comes_early_waits_for_what_goes_before_it() -> None:
    own = Incoming()
    assert own.put("s", message(3, b"c")) == []
    assert own.put("s", message(2, b"b")) == []
    assert own.has_gap("s")
    assert told(own.put("s", message(1, b"a"))) == [(1, 1, b"a"), (1, 2, b"b"), (1, 3, b"c")]
    assert not own.has_gap("s")


@pytest.mark.parametrize("seq", [1, 2, 4])
def test_what_comes_twice_counts_once(seq: int) -> None:
    own = Incoming()
    for number in (1, 2, 4):
        own.put("s", message(number))
    assert own.put("s", message(seq)) == []
    assert told(own.put("s", message(3))) == [(1, 3, b"x"), (1, 4, b"x")]


def test_parts_are_joined_and_numbered_as_one() -> None:
    own = Incoming()
    assert own.put("s", message(1, b"ab", more=True)) == []
    assert told(own.put("s", message(2, b"cd"))) == [(1, 1, b"abcd")]
    assert told(own.put("s", message(3, b"e"))) == [(1, 2, b"e")]


def test_a_second_server_is_a_higher_attempt_from_1() -> None:
    own = Incoming()
    own.put("s", message(1))
    assert told(own.put("t", message(1, attempt=2))) == [(2, 1, b"x")]
    assert told(own.put("s", message(2))) == [(1, 2, b"x")]


def test_two_servers_with_one_attempt_number_are_told_apart() -> None:
    """A late acceptance of the first attempt, after its first server was lost."""
    own = Incoming()
    own.put("s", message(1))
    assert told(own.put("t", message(1))) == [(2, 1, b"x")]


def test_a_server_that_starts_anew_is_a_higher_attempt_and_its_old_messages_are_dropped() -> None:
    own = Incoming()
    own.put("s", message(1))
    assert told(own.put("s", message(1, attempt=3))) == [(3, 1, b"x")]
    assert own.put("s", message(2, attempt=1)) == []
    assert own.here("s") == (3, 0, 1)


def test_a_caller_that_does_not_take_them_bounds_what_is_kept() -> None:
    """What is dropped is not here: it comes again."""
    own = Incoming()
    body = bytes(2**20)
    reports = [own.put("s", message(seq, body)) for seq in range(1, 10)]
    assert [len(each) for each in reports] == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert own.here("s") == (1, 0, 3)
    own.taken(reports[1][0])
    assert own.here("s") == (1, 2, 3)
    assert len(own.put("s", message(4, body))) == 1


def test_early_messages_are_bounded_too() -> None:
    own = Incoming()
    for seq in range(2, 12):
        own.put("s", message(seq, bytes(2**20)))
    assert len(own.put("s", message(1))) <= 1 + MAX_KEPT_BYTES // 2**20


def test_a_report_that_is_larger_than_the_room_comes_through_once_nothing_waits() -> None:
    own = Incoming()
    part = bytes(2**20)
    (first,) = own.put("s", message(1))
    own.put("s", message(2, part, more=True))
    assert own.here("s") == (1, 0, 2)
    own.taken(first)
    for seq in range(3, 12):
        own.put("s", message(seq, part, more=True))
        assert own.here("s") == (1, seq, seq)
    (report,) = own.put("s", message(12, part))
    assert len(report.body) == 11 * 2**20


def test_a_report_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_progress, "MAX_REPORT_BYTES", 10)
    own = Incoming()
    own.put("s", message(1, bytes(10), more=True))
    with pytest.raises(EndlessReportError):
        own.put("s", message(2, b"x", more=True))


def test_a_word_is_due_when_what_asked_for_it_was_taken() -> None:
    own = Incoming()
    (first,) = own.put("s", message(1))
    (second,) = own.put("s", message(2, ask=True))
    own.taken(first)
    assert not own.is_word_due("s")
    own.taken(second)
    assert own.is_word_due("s")
    assert own.word("s") == (1, 2)
    assert not own.is_word_due("s")
    assert own.word("s") is None


def test_parts_of_a_report_ask_for_a_word_as_they_come() -> None:
    own = Incoming()
    own.put("s", message(1, more=True, ask=True))
    assert own.is_word_due("s")
    assert own.word("s") == (1, 1)


def test_an_outcome_is_whole_when_all_before_it_is_here() -> None:
    own = Incoming()
    own.expect("s", 2)
    assert not own.is_whole("s")
    own.put("s", message(2))
    assert not own.is_whole("s")
    own.put("s", message(1))
    assert own.is_whole("s")


def test_a_slow_caller_is_told_from_a_server_that_sends_nothing() -> None:
    own = Incoming()
    assert not own.waits_for_caller("s")
    (report,) = own.put("s", message(1))
    assert own.waits_for_caller("s")
    own.taken(report)
    assert not own.waits_for_caller("s")


@pytest.mark.parametrize("total", [None, 0])
def test_an_outcome_without_progress_is_whole(total: int | None) -> None:
    """An older server names no total."""
    own = Incoming()
    own.expect("s", total)
    assert own.is_whole("s")
    assert own.is_whole("t")


def test_a_stranger_has_nothing_here() -> None:
    own = Incoming()
    assert own.here("s") is None
    assert own.word("s") is None
    assert not own.is_word_due("s")
    assert not own.has_gap("s")
    own.taken(Report("s", 1, 1, 1, b""))


# ---- the caller's end


def test_a_caller_hears_and_takes_each_report_until_its_call_has_ended() -> None:
    heard: list[RolloutProgress] = []
    taken: list[Report] = []
    watch = Watch(heard.append, taken.append)
    first, late = Report("s", 2, 1, 1, encode({"n": 1})), Report("s", 2, 2, 2, encode({"n": 2}))
    watch.report(first)
    watch.end()
    watch.report(late)
    assert heard == [RolloutProgress(2, 1, {"n": 1})]
    assert taken == [first]


@pytest.mark.parametrize("body", [b"\xc1", encode([1])])
def test_a_report_that_cannot_be_read_is_logged_and_counts_as_taken(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[RolloutProgress] = []
    taken: list[Report] = []
    Watch(heard.append, taken.append).report(Report("server1", 1, 1, 1, body))
    assert (heard, len(taken)) == ([], 1)
    assert "server1 cannot be read" in caplog.text


# ---- both ends


@given(
    sizes=st.lists(st.integers(0, 2_000), max_size=25),
    window_bytes=st.integers(1, 4_000),
    seed=st.integers(0, 2**32),
)
def test_whatever_is_lost_doubled_or_delayed_all_comes_in_order_once(
    sizes: list[int], window_bytes: int, seed: int
) -> None:
    """Both ends together, over a way that loses a third and delays the rest, with checks until all is there."""
    way = random.Random(seed)
    server, own = ProgressBuffer(attempt=1, window_bytes=window_bytes), Incoming()
    bodies = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    got: list[Report] = []
    flying: list[Chunk] = []

    def fly(chunks: list[Chunk]) -> None:
        flying.extend(chunk for chunk in chunks for _ in range(way.choice((0, 1, 1, 2))))

    def land() -> None:
        while flying:
            chunk = flying.pop(way.randrange(len(flying)))
            for report in own.put("s", Message(1, chunk.seq, chunk.body, chunk.more, chunk.ask)):
                got.append(report)
                own.taken(report)

    for body in bodies:
        fly(server.put(body, chunk_bytes=300))
        if way.random() < 0.3:
            land()
    own.expect("s", server.last)
    server.told()
    for _ in range(1_000):
        land()
        if own.is_whole("s"):
            break
        _, taken, received = own.here("s") or (1, 0, 0)
        fly(server.heard(taken)[1])
        fly(server.lost(received))
    assert [(report.number, report.body) for report in got] == list(enumerate(bodies, start=1))
