"""Calls per second and large results, beside a bare NATS echo of the same payload in the same run.

    python -m bench.roundtrip

The server (and the echo) runs in a process of its own; the client is this process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import uvloop

from bench.envs import PayloadEnv, payload
from envbus.bus.codec import decode, encode
from envbus.bus.embedded import EmbeddedNats
from envbus.client import NATSEnvClient
from envbus.server import NATSEnvServer

ROUNDS = 3
CASES = [(1, 1_000), (64, 5_000), (1024, 5_000)]
"""Concurrency and calls."""
LARGE_BYTES, LARGE_AT_ONCE, LARGE_CALLS = 5_000_000, 8, 24
Call = Callable[[], Awaitable[Any]]


async def rate(call: Call, concurrency: int, calls: int) -> float:
    """Return calls per second."""
    left = iter(range(calls))

    async def worker() -> None:
        for _ in left:
            await call()

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return calls / (time.perf_counter() - started)


def serve(url: str) -> None:
    options = {"environment": PayloadEnv(), "max_concurrent": 2048, "log_level": "WARNING"}
    NATSEnvServer.run_server("payload", None, url, **options)


def echo(url: str) -> None:
    async def run() -> None:
        connection = await nats.connect(url)

        async def handle(message: Any) -> None:
            await message.respond(message.data)

        await connection.subscribe("echo", queue="workers", cb=handle)
        await asyncio.Event().wait()

    uvloop.run(run())


async def main() -> None:
    context = multiprocessing.get_context("spawn")
    async with EmbeddedNats() as server:
        processes = [context.Process(target=target, args=(server.url,), daemon=True) for target in (serve, echo)]
        for process in processes:
            process.start()
        try:
            await measure(server.url)
        finally:
            for process in processes:
                process.terminate()
                process.join()


async def measure(url: str) -> None:
    bare = await nats.connect(url)
    small = b"x" * 1_000
    async with NATSEnvClient(url, "payload") as client:
        await client.wait_for_server(timeout_s=60)

        async def rollout(size: int = 1_000) -> Any:
            return await client.run_rollout({"prompt": [], "example_id": 0, "size": size}, None, "none")

        print(f"{'1 KB results':28}{'envbus/s':>10}{'bare echo/s':>13}{'ratio':>8}   median of {ROUNDS} rounds")
        for concurrency, calls in CASES:
            ours, theirs = [], []
            for _ in range(ROUNDS):
                ours.append(await rate(rollout, concurrency, calls))
                theirs.append(await rate(lambda: bare.request("echo", small, timeout=30), concurrency, calls))
            a, b = statistics.median(ours), statistics.median(theirs)
            print(f"{f'{concurrency} at once':28}{a:10,.0f}{b:13,.0f}{a / b:8.2f}")
        rates = [await rate(lambda: rollout(LARGE_BYTES), LARGE_AT_ONCE, LARGE_CALLS) for _ in range(ROUNDS)]
        megabytes = statistics.median(rates) * LARGE_BYTES / 1e6
        result = payload(LARGE_BYTES)
        started = time.perf_counter()
        decode(encode(result))
        alone = LARGE_BYTES / 1e6 / (time.perf_counter() - started)
        print(f"{'5 MB results, 8 at once':28}{megabytes:7.0f} MB/s; packing and unpacking alone {alone:.0f} MB/s")
    await bare.close()


if __name__ == "__main__":
    asyncio.run(main())
