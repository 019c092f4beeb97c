"""Memory of a client and of a server: idle, with many jobs pending or running, and after many rollouts.

    python -m bench.memory [--quick]

The server has a process of its own; the client is this process. Resident memory,
less what it was before; "x payload" divides it by the encoded size of what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psutil

from envbus.bus.codec import encode
from envbus.bus.embedded import EmbeddedNats
from envbus.client import NATSEnvClient

MB = 1e6
AT_ONCE = 64
PROMPT = [{"role": "user", "content": "x" * 2_000}]
FULL_SLOTS = 8
STATE_BYTES, STATES_AT_ONCE = 5_000_000, 8
RESULT_BYTES = 100_000
SETTLE_S = 2.0


class State(dict[str, Any]):
    """What an environment keeps of one rollout while it runs."""


class StateEnv:
    """Rollouts that sleep, keep a state, return bytes; each says how many states are reachable in its process."""

    requires_group_rollouts = False

    def __init__(self) -> None:
        self._states: weakref.WeakSet[State] = weakref.WeakSet()

    async def run_rollout(self, input: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = State(pages=bytearray(b"x" * input.get("state_bytes", 0)))
        self._states.add(state)
        await asyncio.sleep(input.get("sleep_s", 0))
        output = {"example_id": input["example_id"], "reward": 1.0, "states": len(self._states)}
        return output | {"completion": "x" * input.get("result_bytes", 0)}

    async def run_group(self, group_inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return [await self.run_rollout(item, *args, **kwargs) for item in group_inputs]

    def eval_examples(self) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        pass


State.__hash__ = object.__hash__  # type: ignore[method-assign]


def serve(url: str, name: str, slots: int) -> None:
    from envbus.server import NATSEnvServer

    options: dict[str, Any] = {"environment": StateEnv(), "max_concurrent": slots, "log_level": "WARNING"}
    NATSEnvServer.run_server(name, None, url, **options)


@dataclass
class Memory:
    """Resident memory of both sides."""

    client: int
    server: int


class Bench:
    """One server, one client."""

    def __init__(self, client: NATSEnvClient, server_pid: int) -> None:
        self.client = client
        self._server = psutil.Process(server_pid)

    async def memory(self) -> Memory:
        """Once the last results were confirmed, and the server has forgotten them."""
        await asyncio.sleep(SETTLE_S)
        gc.collect()
        return Memory(psutil.Process().memory_info().rss, self._server.memory_info().rss)

    async def rollout(self, **fields: Any) -> Any:
        return await self.client.run_rollout({"prompt": [], "example_id": 0} | fields, None, "none")  # type: ignore[arg-type]

    async def many(self, count: int, at_once: int, **fields: Any) -> int:
        """Run so many rollouts; returns the most states that were reachable at once."""
        left, most = iter(range(count)), 0

        async def worker() -> None:
            nonlocal most
            for _ in left:
                most = max(most, (await self.rollout(**fields))["states"])

        await asyncio.gather(*(worker() for _ in range(at_once)))
        return most


async def with_server(url: str, name: str, slots: int, use: Callable[[Bench], Awaitable[None]]) -> None:
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(url, name, slots), daemon=True)
    process.start()
    try:
        async with NATSEnvClient(url, name) as client:
            await client.wait_for_server(timeout_s=60)
            assert process.pid is not None
            await use(Bench(client, process.pid))
    finally:
        process.terminate()
        process.join()


async def held_jobs(bench: Bench, jobs: int, what: str) -> None:
    """Memory that jobs take while nothing of them ends."""
    before = await bench.memory()
    print(f"idle: client {before.client / MB:.0f} MB, server {before.server / MB:.0f} MB")
    size = len(encode({"input": {"prompt": PROMPT, "example_id": 0, "sleep_s": 600}, "model": "none"}))
    calls = [asyncio.create_task(bench.rollout(prompt=PROMPT, sleep_s=600)) for _ in range(jobs)]
    await asyncio.sleep(10)
    now, cpu = await bench.memory(), psutil.Process().cpu_times()
    await asyncio.sleep(5)
    after = psutil.Process().cpu_times()
    busy = (after.user + after.system - cpu.user - cpu.system) / 5
    for side in ("client", "server"):
        grown = getattr(now, side) - getattr(before, side)
        each = grown / jobs
        print(
            f"{jobs:,} jobs {what}, {size:,} bytes each: {side} +{grown / MB:.1f} MB, {each:,.0f} bytes a job "
            f"({each / size:.1f} x payload)"
        )
    print(f"  the client's CPU meanwhile: {busy:.1%} of a core")
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def many_results(bench: Bench, few: int, many: int) -> None:
    """Memory after many rollouts over that after a few."""
    await bench.many(few, AT_ONCE, result_bytes=RESULT_BYTES)
    base = await bench.memory()
    await bench.many(many - few, AT_ONCE, result_bytes=RESULT_BYTES)
    now = await bench.memory()
    print(f"after {many:,} rollouts of {RESULT_BYTES:,} bytes over after {few:,}:")
    for side in ("client", "server"):
        after, over = getattr(now, side), getattr(now, side) / getattr(base, side)
        print(f"  {side} {over:.2f} x ({after / MB:.0f} MB)")


async def large_states(bench: Bench, rollouts: int) -> None:
    """P33: memory and reachable states while rollouts with large states come and go."""
    rounds, step = [], rollouts // 10
    for _ in range(10):
        most = await bench.many(step, STATES_AT_ONCE, state_bytes=STATE_BYTES, result_bytes=RESULT_BYTES)
        rounds.append(((await bench.memory()).server / MB, most))
    sizes = ", ".join(f"{size:.0f}" for size, _ in rounds)
    print(f"{rollouts:,} rollouts with a state of 5 MB, 8 at a time, ten rounds: server MB {sizes}")
    print(f"  states reachable at most: {[most for _, most in rounds]}")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a tenth of the rollouts")
    scale = 10 if parser.parse_args().quick else 1
    async with EmbeddedNats() as nats:
        jobs = 10_000
        await with_server(nats.url, "full", FULL_SLOTS, lambda bench: held_jobs(bench, jobs, "waiting"))
        await with_server(nats.url, "wide", jobs, lambda bench: held_jobs(bench, jobs, "running"))
        await with_server(nats.url, "results", AT_ONCE, lambda b: many_results(b, 2_000 // scale, 20_000 // scale))
        await with_server(nats.url, "states", STATES_AT_ONCE, lambda bench: large_states(bench, 2_000 // scale))


if __name__ == "__main__":
    asyncio.run(main())
