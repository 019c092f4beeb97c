"""How close the scheduling comes to the ideal, and how long a small late client waits behind a big one.

    python -m bench.scheduling

Both sides run in the same process on the same nats-server: envbus, and a plain
queue group (each server answers what it gets, at most its slots at once).
Durations are slept, so the ratios say nothing of speed but all of scheduling.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats

from envbus.bus.embedded import EmbeddedNats
from envbus.client import NATSEnvClient
from envbus.server import NATSEnvServer

SERVERS, SLOTS, JOB_S = 8, 2, 0.05
BURST, BIG, SMALL, LATE_S = 64, 1500, 20, 1.0
ROUNDS = 3


class SleepEnv:
    requires_group_rollouts = False

    async def run_rollout(self, input: dict[str, Any], client: Any, model: str, *args: Any, **kwargs: Any) -> dict:
        await asyncio.sleep(JOB_S)
        return {"example_id": input["example_id"], "reward": 1.0}

    async def run_group(self, group_inputs: list, client: Any, model: str, *args: Any, **kwargs: Any) -> list:
        return [await self.run_rollout(item, client, model) for item in group_inputs]

    def eval_examples(self) -> list:
        return []

    async def close(self) -> None:
        pass


Run = Callable[[], Awaitable[Any]]


async def measure(first: Run, second: Run) -> tuple[float, float]:
    """Return the makespan of BURST jobs, and the time of SMALL jobs that come behind BIG ones, in seconds."""
    started = time.perf_counter()
    await asyncio.gather(*(first() for _ in range(BURST)))
    makespan_s = time.perf_counter() - started

    big = [asyncio.ensure_future(first()) for _ in range(BIG)]
    await asyncio.sleep(LATE_S)
    started = time.perf_counter()
    await asyncio.gather(*(second() for _ in range(SMALL)))
    small_s = time.perf_counter() - started
    for job in big:
        job.cancel()
    await asyncio.gather(*big, return_exceptions=True)
    return makespan_s, small_s


async def envbus_side(url: str) -> tuple[float, float]:
    servers = [
        NATSEnvServer("sleep", address=url, environment=SleepEnv(), max_concurrent=SLOTS, handle_signals=False)
        for _ in range(SERVERS)
    ]
    running = [asyncio.create_task(server.run()) for server in servers]
    async with NATSEnvClient(url, "sleep") as first, NATSEnvClient(url, "sleep") as second:
        await asyncio.gather(first.wait_for_server(), second.wait_for_server())
        while len(await first.servers()) < SERVERS:
            pass  # servers() listens for a second
        rollout = {"prompt": [], "example_id": 0}
        result = await measure(
            lambda: first.run_rollout(rollout, None, "none"), lambda: second.run_rollout(rollout, None, "none")
        )
    await asyncio.gather(*(server.close() for server in servers))
    await asyncio.gather(*running)
    return result


class PlainServer:
    """A member of a plain queue group: takes what it gets, runs SLOTS at once."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, message: Any) -> None:
        task = asyncio.create_task(self._serve(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, message: Any) -> None:
        async with self._slots:
            await asyncio.sleep(JOB_S)
        await message.respond(b"done")


async def plain_side(url: str) -> tuple[float, float]:
    connections = [await nats.connect(url) for _ in range(SERVERS + 2)]
    for connection in connections[:SERVERS]:
        await connection.subscribe("plain", queue="workers", cb=PlainServer().handle)
        await connection.flush()
    first, second = connections[SERVERS:]
    result = await measure(
        lambda: first.request("plain", b"", timeout=120), lambda: second.request("plain", b"", timeout=120)
    )
    for connection in connections:
        await connection.close()
    return result


async def main() -> None:
    ideal_s = math.ceil(BURST / (SERVERS * SLOTS)) * JOB_S
    fair_s = math.ceil(SMALL / (SERVERS * SLOTS / 2)) * JOB_S
    sides = {"envbus": envbus_side, "plain queue group": plain_side}
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    async with EmbeddedNats() as server:
        for _ in range(ROUNDS):
            for name, side in sides.items():
                results[name].append(await side(server.url))
    print(f"{SERVERS} servers x {SLOTS} slots, {JOB_S * 1000:.0f} ms jobs, median of {ROUNDS} rounds")
    print(f"{'':20}{BURST} jobs: s (x ideal)    {SMALL} late jobs behind {BIG}: s (x fair share)")
    for name, rounds in results.items():
        makespan_s = statistics.median(r[0] for r in rounds)
        small_s = statistics.median(r[1] for r in rounds)
        print(f"{name:20}{makespan_s:.3f} ({makespan_s / ideal_s:.2f})          {small_s:.3f} ({small_s / fair_s:.2f})")


if __name__ == "__main__":
    asyncio.run(main())
