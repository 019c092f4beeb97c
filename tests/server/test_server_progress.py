"""What a server keeps of a job's progress: cut, windowed, acknowledged, sent again; and the env's end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.bodies import BodyWorkers
from envbus.bus.codec import decode_map
from envbus.errors import EncodeError
from envbus.server.outlet import Outlet
from envbus.server.progress import REPORT_OVERHEAD_BYTES, Chunk, ProgressBuffer, cost_bytes

WINDOW = 4_000


def buffer(window_bytes: int = WINDOW) -> ProgressBuffer:
    return ProgressBuffer(attempt=1, window_bytes=window_bytes)


def seqs(chunks: list[Chunk]) -> list[int]:
    return [chunk.seq for chunk in chunks]


def test_a_report_that_fits_is_one_message() -> None:
    (chunk,) = buffer().put(b"abc", chunk_bytes=10)
    assert (chunk.seq, chunk.body, chunk.more) == (1, b"abc", False)


def test_a_large_report_is_cut_and_only_its_last_message_ends_it() -> None:
    chunks = buffer().put(b"0123456789", chunk_bytes=4)
    assert [(chunk.seq, chunk.body, chunk.more) for chunk in chunks] == [
        (1, b"0123", True),
        (2, b"4567", True),
        (3, b"89", False),
    ]


def test_an_empty_report_is_a_message() -> None:
    assert seqs(buffer().put(b"", chunk_bytes=4)) == [1]


def test_no_more_than_the_window_is_sent_until_it_was_taken() -> None:
    own = buffer()
    body = bytes(1_000 - REPORT_OVERHEAD_BYTES)
    assert [seqs(own.put(body, chunk_bytes=1_000)) for _ in range(6)] == [[1], [2], [3], [4], [], []]
    assert own.last == 6
    assert own.size_bytes == 6_000
    assert own.heard(2) == (2_000, [Chunk(5, body, False, True), Chunk(6, body, False, True)])


def test_a_report_over_the_window_goes_part_by_part() -> None:
    own = buffer()
    assert seqs(own.put(bytes(10_000), chunk_bytes=1_000)) == [1, 2, 3, 4]
    sent = [seqs(own.heard(seq)[1]) for seq in (4, 8, 10)]
    assert sent == [[5, 6, 7, 8], [9, 10], []]
    assert own.size_bytes == 0


def test_a_message_over_the_window_goes_alone() -> None:
    own = buffer(window_bytes=10)
    assert [seqs(own.put(bytes(500), chunk_bytes=500)) for _ in range(2)] == [[1], []]
    freed_bytes, chunks = own.heard(1)
    assert (freed_bytes, seqs(chunks)) == (cost_bytes(bytes(500)), [2])


def test_what_is_freed_is_what_the_reports_cost() -> None:
    own = buffer(window_bytes=10**6)
    bodies = [bytes(size) for size in (0, 1, 999, 1_000, 5_001)]
    for body in bodies:
        own.put(body, chunk_bytes=1_000)
    assert own.heard(own.last)[0] == sum(map(cost_bytes, bodies))


def test_the_client_is_asked_for_a_word_before_the_window_is_full() -> None:
    own = buffer()
    chunks = [chunk for _ in range(20) for chunk in own.put(bytes(44), chunk_bytes=1_000)]
    assert [chunk.seq for chunk in chunks if chunk.ask] == [4, 8, 12]


def test_the_end_of_a_large_report_asks_for_a_word() -> None:
    """The next one needs the room."""
    chunks = buffer().put(bytes(1_100), chunk_bytes=1_000)
    assert chunks[-1].ask


def test_a_check_brings_again_what_should_have_arrived() -> None:
    own = buffer()
    for _ in range(3):
        own.put(b"x", chunk_bytes=10)
    assert own.lost(received=1) == []  # still on their way, for all that is known
    own.put(b"x", chunk_bytes=10)
    assert seqs(own.lost(received=1)) == [2, 3]
    assert seqs(own.lost(received=3)) == [4]
    assert own.lost(received=4) == []


def test_behind_the_outcome_the_first_check_brings_everything() -> None:
    own = buffer()
    own.put(b"x", chunk_bytes=10)
    own.put(b"x", chunk_bytes=10)
    own.told()
    assert seqs(own.lost(received=0)) == [1, 2]


def test_what_was_never_sent_is_not_lost() -> None:
    own = buffer()
    own.put(bytes(10_000), chunk_bytes=1_000)
    own.told()
    assert seqs(own.lost(received=0)) == [1, 2, 3, 4]


@pytest.mark.parametrize("seq", [0, 1, 10**9])
def test_a_word_about_what_is_not_there_is_harmless(seq: int) -> None:
    own = buffer()
    assert own.heard(seq) == (0, [])
    own.put(b"x", chunk_bytes=10)
    own.heard(1)
    assert own.heard(seq) == (0, [])


@given(st.lists(st.one_of(st.integers(0, 3_000), st.none()), max_size=60), st.integers(1, 5_000))
def test_the_window_holds_and_the_order_is_kept(steps: list[int | None], window_bytes: int) -> None:
    """None: the caller takes what was sent."""
    own = buffer(window_bytes)
    sent: list[Chunk] = []
    heard = 0
    for size in steps:
        if size is None:
            heard = sent[-1].seq if sent else 0
            sent += own.heard(heard)[1]
        else:
            sent += own.put(bytes(size), chunk_bytes=700)
        under_way = [chunk for chunk in sent if chunk.seq > heard]
        assert len(under_way) <= 1 or sum(chunk.cost_bytes for chunk in under_way) <= window_bytes
    assert seqs(sent) == list(range(1, len(sent) + 1))
    while sent and sent[-1].seq < own.last:
        sent += own.heard(sent[-1].seq)[1]
    assert len(sent) == own.last


# ---- the env's end


@pytest.fixture
def sent() -> list[bytes]:
    return []


@pytest.fixture
def outlet(sent: list[bytes]) -> Iterator[Outlet]:
    workers = BodyWorkers()
    yield Outlet(attempt=1, window_bytes=WINDOW, workers=workers, send=sent.append)
    workers.stop()


async def test_reports_go_out_in_the_order_of_the_calls(outlet: Outlet, sent: list[bytes]) -> None:
    """Large ones are packed on a thread, and small ones do not overtake them."""
    reports = [{"n": n, "text": "x" * (600_000 if n % 3 == 0 else 1)} for n in range(9)]
    async with asyncio.TaskGroup() as tasks:
        for report in reports:
            tasks.create_task(outlet.report(report))
        while len(sent) < len(reports):
            outlet.heard(10**9)
            await asyncio.sleep(0.001)
    assert [decode_map(body) for body in sent] == reports


async def test_a_report_is_as_it_was_at_the_call(outlet: Outlet, sent: list[bytes]) -> None:
    messages = [{"role": "user", "content": "a"}]
    blocker = asyncio.create_task(outlet.report({"text": "x" * 10_000}))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(outlet.report({"messages": messages}))
    await asyncio.sleep(0)
    messages.append({"role": "user", "content": "b"})
    await blocker
    outlet.heard(10**9)
    await waiting
    assert decode_map(sent[1]) == {"messages": [{"role": "user", "content": "a"}]}


async def test_a_report_waits_for_room(outlet: Outlet, sent: list[bytes]) -> None:
    await outlet.report({"blob": bytes(3_000)})
    waiting = asyncio.create_task(outlet.report({"blob": bytes(3_000)}))
    await asyncio.wait({waiting}, timeout=0.05)
    assert len(sent) == 1
    outlet.heard(cost_bytes(sent[0]))
    await waiting
    assert len(sent) == 2


async def test_a_cancelled_report_leaves_no_half_behind(outlet: Outlet, sent: list[bytes]) -> None:
    await outlet.report({"blob": bytes(3_000)})
    waiting = asyncio.create_task(outlet.report({"blob": bytes(30_000)}))
    await asyncio.wait({waiting}, timeout=0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    outlet.heard(10**9)
    await outlet.report({"n": 3})
    assert [len(body) for body in sent][1:] == [len(sent[-1])]


async def test_the_end_of_the_call_ends_the_wait(outlet: Outlet, sent: list[bytes]) -> None:
    await outlet.report({"blob": bytes(3_000)})
    waiting = asyncio.create_task(outlet.report({"blob": bytes(3_000)}))
    await asyncio.wait({waiting}, timeout=0.05)
    outlet.close()
    await asyncio.wait_for(waiting, 20)
    assert len(sent) == 1


async def test_data_that_cannot_travel_is_an_error_at_the_call(outlet: Outlet, sent: list[bytes]) -> None:
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(EncodeError):
        await outlet.report({"deep": deep})
    await outlet.report({"n": 1})
    assert len(sent) == 1
