"""The bus thread and the crossing: order, errors, cancels, and an end that leaves nobody waiting."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator

import pytest

from envbus.bus.thread import BusThread, Crossing
from envbus.errors import BusClosedError


@pytest.fixture
def thread() -> Iterator[BusThread]:
    bus_thread = BusThread()
    yield bus_thread
    bus_thread.stop()


async def test_run_returns_and_raises_what_the_coroutine_does(thread: BusThread) -> None:
    async def where(fails: bool) -> str:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("inside")
        return threading.current_thread().name

    assert await thread.run(where(False)) == "envbus"
    with pytest.raises(ValueError, match="inside"):
        await thread.run(where(True))


async def test_a_cancel_reaches_the_bus_loop(thread: BusThread) -> None:
    """P06."""
    running, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    call = asyncio.create_task(thread.run(wait()))
    assert await asyncio.to_thread(running.wait, 2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(cancelled.wait, 2)


async def test_stop_ends_what_runs_with_an_error_and_not_with_a_cancel(thread: BusThread) -> None:
    """P11: a caller that nobody cancelled must not see a CancelledError."""
    call = asyncio.create_task(thread.run(asyncio.sleep(60)))
    await thread.run(asyncio.sleep(0))
    await asyncio.to_thread(thread.stop)
    with pytest.raises(BusClosedError):
        await call
    thread.stop()


async def test_the_bus_loop_goes_on_while_the_callers_loop_is_blocked(thread: BusThread) -> None:
    """P08."""
    ticks: list[float] = []

    async def tick() -> None:
        for _ in range(20):
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    call = asyncio.create_task(thread.run(tick()))
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - a caller that blocks its loop
    assert len(ticks) == 20
    await call


async def test_posts_run_in_order_on_the_other_loop(thread: BusThread) -> None:
    """Posts of one thread keep their order, however they race with the loop that runs them."""
    here = Crossing(asyncio.get_running_loop())
    seen: list[int] = []
    done = asyncio.Event()

    def collect(number: int) -> None:
        seen.append(number)
        if number == 19_999:
            done.set()

    async def post_all() -> None:
        for number in range(20_000):
            here.post(collect, number)

    await thread.run(post_all())
    async with asyncio.timeout(30):
        await done.wait()
    assert seen == list(range(20_000))


async def test_many_posts_share_one_wake_up() -> None:
    loop = asyncio.get_running_loop()
    wake_ups = 0
    original = loop.call_soon_threadsafe

    class CountingLoop:
        def call_soon_threadsafe(self, function: object, *args: object) -> None:
            nonlocal wake_ups
            wake_ups += 1
            original(function, *args)  # type: ignore[arg-type]

    crossing = Crossing(CountingLoop())  # type: ignore[arg-type]
    done = asyncio.Event()
    for _ in range(100):
        crossing.post(lambda: None)
    crossing.post(done.set)
    await done.wait()
    assert wake_ups == 1
    done.clear()
    crossing.post(done.set)
    await done.wait()
    assert wake_ups == 2


async def test_a_post_that_fails_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    crossing = Crossing(asyncio.get_running_loop())
    done = asyncio.Event()

    def fail() -> None:
        raise ValueError("a bad post")

    crossing.post(fail)
    crossing.post(done.set)
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        async with asyncio.timeout(20):
            await done.wait()
    assert "a bad post" in caplog.text


def test_a_post_to_a_closed_loop_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    crossing = Crossing(loop)
    loop.close()
    crossing.post(pytest.fail, "must not run")
    crossing.post(pytest.fail, "must not run")


async def test_the_thread_ends_even_if_a_connection_was_left_open() -> None:
    """uvloop does not close with one, and nats-py leaves one when its close() is cut short."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        closed.set()

    kept: list[object] = []

    async def connect(port: int) -> None:
        kept.append(await asyncio.open_connection("127.0.0.1", port))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        bus_thread = BusThread()
        await bus_thread.run(connect(server.sockets[0].getsockname()[1]))
        await asyncio.to_thread(bus_thread.stop)
        async with asyncio.timeout(30):
            await closed.wait()
