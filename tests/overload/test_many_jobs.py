"""10,000 jobs of one client, and 50 clients at once: all complete, in turns, and waiting costs next to nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from monitored_bus import MonitoredBus
from stage import Stage, do, run, settled

from envbus import NATSEnvClient
from envbus.bus.messages import Beat

JOBS, GIVEN_UP = 10_000, 2_000
CLIENTS, JOBS_EACH = 50, 12
DEFAULT_PACE: dict[str, Any] = {"check_interval_s": 1.0, "accept_timeout_s": 1.5, "wait_repeat_s": 2.0}
PATIENCE_S = 60.0
WATCH_S = 1.5
"""How long messages are counted while nothing but waiting goes on."""


async def launch(stage: Stage, *, servers: int, slots: int) -> None:
    for _ in range(servers):
        settings = {"beat_interval_s": 0.5, "probe_after_s": 3.0, "orphan_grace_s": 10.0}
        stage.launch(max_concurrent=slots, settings=settings, env_args={"ledger": os.devnull})
    await stage.ready()


@asynccontextmanager
async def under_way(calls: Iterable[Coroutine[Any, Any, Any]]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Start calls; those that still run at the end of this are cancelled."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def all_slots_taken(stage: Stage, slots: int) -> AsyncIterator[None]:
    """Nothing else runs until the end of this; then all of it may."""
    async with stage.client() as other, under_way(run(other, do("slow", t=600)) for _ in range(slots)):
        async with stage.beats() as beats:
            await beats.until(lambda now: sum(beat.in_flight for beat in now) == slots, timeout_s=PATIENCE_S)
        yield


async def in_line(stage: Stage, jobs: int) -> None:
    """Wait until each server knows that so many jobs wait."""

    def knows(beat: Beat) -> bool:
        return beat.waiting_jobs == jobs

    async with stage.beats() as beats:
        await beats.until(lambda now: len(now) == len(stage.servers) and all(map(knows, now)), timeout_s=PATIENCE_S)


async def messages_per_s(bus: MonitoredBus) -> float:
    before, started = (await bus.varz())["in_msgs"], time.monotonic()
    await asyncio.sleep(WATCH_S)
    return float(((await bus.varz())["in_msgs"] - before) / (time.monotonic() - started))


async def test_ten_thousand_jobs_of_one_client(monitored: Stage, bus: MonitoredBus) -> None:
    """They wait as one number, not as 10,000 messages or tasks; all complete; both sides' tables are empty."""
    await launch(monitored, servers=2, slots=32)
    items = [do("slow", t=0) for _ in range(JOBS)]
    async with monitored.client(settings=DEFAULT_PACE) as client, AsyncExitStack() as jobs:
        async with all_slots_taken(monitored, 64):
            calls = await jobs.enter_async_context(under_way(run(client, item) for item in items))
            async with under_way(run(client, do()) for _ in range(GIVEN_UP)):
                await in_line(monitored, JOBS + GIVEN_UP)
                assert client._bus is not None
                assert len(asyncio.all_tasks(client._bus.thread._loop)) < 50
                assert await messages_per_s(bus) < 100
                before = (await bus.varz())["in_msgs"]
            await in_line(monitored, JOBS)
            assert (await bus.varz())["in_msgs"] - before < 500, "no server has heard of what was given up"
        outputs = await asyncio.gather(*calls)
        assert (await bus.varz())["in_msgs"] - before < 8 * JOBS
        assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
        await settled(client)
    await monitored.idle()
    assert (await bus.varz())["slow_consumers"] == 0


async def test_fifty_clients_at_once(monitored: Stage, bus: MonitoredBus) -> None:
    """Each on a connection of its own: all jobs complete, nobody is served far ahead, waiting makes no storm."""
    await launch(monitored, servers=3, slots=4)
    ended: Counter[int] = Counter()
    ahead: dict[int, int] = {}
    """The most that anybody had had when this client got its first result."""

    async def call(number: int, client: NATSEnvClient) -> None:
        await run(client, do("slow", t=0.01))
        ended[number] += 1
        ahead.setdefault(number, max(ended.values()))

    async with AsyncExitStack() as stack:
        clients = []
        for number in range(CLIENTS):
            client = monitored.client(settings=DEFAULT_PACE, address=bus.url_of(f"c{number}"))
            clients.append(await stack.enter_async_context(client))
        assert len({client._bus for client in clients}) == CLIENTS
        async with all_slots_taken(monitored, 12):
            numbered = list(enumerate(clients)) * JOBS_EACH
            calls = await stack.enter_async_context(under_way(call(number, client) for number, client in numbered))
            await in_line(monitored, CLIENTS * JOBS_EACH)
            # Each client says so every 2 s, and each of 3 servers answers.
            assert await messages_per_s(bus) < 300
        await asyncio.gather(*calls)
        assert ended == dict.fromkeys(range(CLIENTS), JOBS_EACH)
        assert max(ahead.values()) <= 2 * JOBS_EACH / 3
        for client in clients:
            await settled(client)
    await monitored.idle()
    assert (await bus.varz())["slow_consumers"] == 0
