"""P03: results of 50 MB by the dozen for a caller whose event loop is blocked: none lost, memory bounded."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

import psutil
from monitored_bus import MonitoredBus
from stage import READY_S, Stage, becomes, do, run, settled

from envbus import NATSEnvClient
from envbus.client.undelivered import Undelivered

MB = 1_000_000
RESULT_BYTES, RESULTS = 50 * MB, 12
BUDGET_BYTES = 2 * RESULT_BYTES + MB
"""Room for two results at a time."""


def undelivered(client: NATSEnvClient) -> Undelivered:
    assert client._session is not None
    return client._session._large._transfers.undelivered


async def size_of_result(client: NATSEnvClient, size_bytes: int) -> int:
    """Run a rollout with a large result and keep nothing of it."""
    return len((await run(client, do("big", n=size_bytes)))["blob"])


async def test_a_dozen_results_of_50_mb_for_a_blocked_caller(monitored: Stage, bus: MonitoredBus) -> None:
    """P03: what the caller cannot take stays on the server; NATS sees no slow consumer; all arrive in the end."""
    monitored.launch(max_concurrent=RESULTS)
    async with monitored.client(settings={"max_undelivered_bytes": BUDGET_BYTES}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        before = memory_bytes()
        calls = [asyncio.create_task(size_of_result(client, RESULT_BYTES)) for _ in range(RESULTS)]
        await monitored.event("start", count=RESULTS)
        block_until(lambda: undelivered(client).size_bytes > BUDGET_BYTES - RESULT_BYTES)
        time.sleep(1.5)  # noqa: ASYNC251 - a caller that blocks its loop
        assert undelivered(client).size_bytes <= BUDGET_BYTES
        assert memory_bytes() - before < 6 * RESULT_BYTES
        assert await asyncio.gather(*calls) == [RESULT_BYTES] * RESULTS
        assert client._bus is not None
        assert client._bus.connection.stats.reconnects == client._bus.connection.stats.slow_consumers == 0
        await settled(client)
        await becomes(lambda: len(undelivered(client)) == 0)
    assert (await bus.varz())["slow_consumers"] == 0
    await monitored.idle()


async def test_calls_that_are_given_up_make_room(stage: Stage) -> None:
    """P03: whether the result was waiting for room, on its way, or there and not taken."""
    stage.launch(max_concurrent=8)
    async with stage.client(settings={"max_undelivered_bytes": 1}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        given_up = [asyncio.create_task(run(client, do("big", n=MB))) for _ in range(8)]
        await stage.event("start", count=8)
        block_until(lambda: len(undelivered(client)) == 8)
        for call in given_up:
            call.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        assert await asyncio.wait_for(size_of_result(client, 2 * MB), 40) == 2 * MB
        await settled(client)
        await becomes(lambda: len(undelivered(client)) == 0)
        assert client._session is not None
        assert client._session._large._collectors == {}
    await stage.idle()


async def test_room_is_given_in_order_and_a_result_over_the_bound_goes_alone() -> None:
    room = Undelivered(100)
    order: list[str] = []

    async def take(job: str, size_bytes: int) -> None:
        await room.reserve(job, size_bytes)
        order.append(job)

    calls = [asyncio.create_task(take(job, size)) for job, size in [("a", 60), ("b", 50), ("c", 10), ("d", 500)]]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (order, room.size_bytes) == (["a"], 60), "nothing overtakes"
    calls[1].cancel()
    room.release("a")
    await asyncio.gather(calls[0], calls[2])
    assert (order, room.size_bytes) == (["a", "c"], 10)
    room.release("unknown")
    room.release("c")
    await calls[3]
    assert (order, room.size_bytes) == (["a", "c", "d"], 500)
    room.release("d")
    assert (len(room), room.size_bytes) == (0, 0)
    assert calls[1].cancelled()


def block_until(condition: Callable[[], bool]) -> None:
    """Block the caller's loop; the bus thread goes on."""
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def memory_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)
