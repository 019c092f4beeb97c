"""How long the loops stand still while large results travel, beside what packing and unpacking one of them takes.

    python -m bench.stall [--quick]

The server runs in a process of its own; each loop has a ticker that notes how late it wakes up.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import multiprocessing
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any

from bench.envs import PayloadEnv
from envbus.bus.codec import decode, encode
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.transfer import pack_body, unpack_body
from envbus.client import NATSEnvClient
from envbus.server import NATSEnvServer

ROUNDS = 3
CASES = [(384_000, 8), (384_000, 1), (2_000_000, 16), (7_700_000, 2)]
"""Tokens of a result (13 bytes each: id, mask, logprob), and results at once."""
QUICK_ROUNDS, QUICK_CASES = 1, CASES[:2]
BYTES_PER_TOKEN = 13
LOOPS = ("env", "caller", "bus")
TICK_S = 0.001


class Ticker:
    """Notes by how much each wake-up of the loop that it runs on is late."""

    def __init__(self) -> None:
        self.late_s: list[float] = []

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_s.append(time.perf_counter() - due)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()

    def take(self) -> tuple[float, float]:
        """Return how late 99 % of the time is no later than, and the longest; start anew."""
        late_s, self.late_s = sorted(self.late_s), []
        elapsed_s = list(accumulate(late + TICK_S for late in late_s))
        return late_s[bisect_left(elapsed_s, 0.99 * elapsed_s[-1])], late_s[-1]


class StallEnv(PayloadEnv):
    """Returns ``tokens`` random token ids, masks and logprobs; with ``late``, how late its loop woke up."""

    def __init__(self) -> None:
        self._ticker = Ticker()
        self._task: asyncio.Task[None] | None = None

    async def run_rollout(self, input: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self._task is None:
            self._task = asyncio.create_task(self._ticker.run())
        if "late" in input:
            return {"example_id": 0, "reward": 1.0, "late": self._ticker.take()}
        return {"example_id": 0, "reward": 1.0, **tokens(input["tokens"])}

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


@functools.cache
def tokens(count: int) -> dict[str, Any]:
    """What nobody can compress away."""
    rng = random.Random(7)
    return {
        "completion_ids": [rng.randrange(150_000) for _ in range(count)],
        "completion_mask": [rng.randrange(2) for _ in range(count)],
        "completion_logprobs": [-rng.random() for _ in range(count)],
    }


def serve(url: str) -> None:
    options = {"environment": StallEnv(), "max_concurrent": 64, "log_level": "WARNING"}
    NATSEnvServer.run_server("stall", None, url, **options)


def alone(count: int) -> tuple[float, float]:
    """Return how long packing and unpacking one result take with nothing else going on."""
    result = tokens(count)
    started = time.perf_counter()
    packed = pack_body(encode(result))
    between = time.perf_counter()
    decode(unpack_body(packed.data, packed.encoding, max_bytes=packed.raw_size))
    return between - started, time.perf_counter() - between


async def one_round(client: NATSEnvClient, count: int, at_once: int, bus: Ticker) -> dict[str, float]:
    async def ask(**fields: Any) -> Any:
        return await client.run_rollout({"prompt": [], "example_id": 0, **fields}, None, "none")

    await ask(tokens=count)  # the server makes them once
    await asyncio.sleep(0.1)
    here = Ticker()
    await ask(late=True)
    bus.late_s.clear()
    async with here.running():
        started = time.perf_counter()
        outputs = await asyncio.gather(*(ask(tokens=count) for _ in range(at_once)))
        took_s = time.perf_counter() - started
    late = {"env": (await ask(late=True))["late"], "caller": here.take(), "bus": bus.take()}
    del outputs
    pack_s, unpack_s = alone(count)
    measured = {"pack": pack_s, "unpack": unpack_s, "MB/s": at_once * count * BYTES_PER_TOKEN / 1e6 / took_s}
    measured |= {f"{loop} p99": p99 for loop, (p99, _) in late.items()}
    return measured | {f"{loop} max": longest for loop, (_, longest) in late.items()}


def row(count: int, at_once: int, measured: dict[str, float]) -> str:
    megabytes = count * BYTES_PER_TOKEN / 1e6
    pack_s, unpack_s = measured["pack"], measured["unpack"]
    ratio = measured["MB/s"] / megabytes * (pack_s + unpack_s)
    text = f"{f'{at_once} of {megabytes:.0f} MB':14}{measured['MB/s']:6.0f}{ratio:7.2f}"
    text += f"{pack_s * 1e3:9.0f}{unpack_s * 1e3:8.0f}"
    for loop, whole_s in zip(LOOPS, (pack_s, unpack_s, unpack_s), strict=True):
        p99, longest = measured[f"{loop} p99"], measured[f"{loop} max"]
        text += f"{p99 * 1e3:8.1f}{longest * 1e3:7.0f}{longest / whole_s:7.2f}"
    return text


async def measure(url: str, rounds_each: int, cases: list[tuple[int, int]]) -> None:
    async with NATSEnvClient(url, "stall") as client:
        await client.wait_for_server(timeout_s=60)
        assert client._bus is not None
        bus = Ticker()
        ticking = client._bus.thread.submit(bus.run())
        print(
            f"lateness of each loop in ms (p99, longest), medians of {rounds_each} round(s); ratio: longest to packing"
        )
        print("one result (env) or unpacking one (caller, bus); of MB/s: to packing and then unpacking alone")
        head = "".join(f"{f'{loop} loop':>22}" for loop in LOOPS)
        print(f"{'results':14}{'MB/s':>6}{'ratio':>7}{'pack ms':>9}{'unpack':>8}{head}")
        for count, at_once in cases:
            rounds = [await one_round(client, count, at_once, bus) for _ in range(rounds_each)]
            print(row(count, at_once, {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}))
            gc.collect()
        ticking.cancel()


async def main(*, quick: bool) -> None:
    process = multiprocessing.get_context("spawn")
    async with EmbeddedNats() as server:
        serving = process.Process(target=serve, args=(server.url,), daemon=True)
        serving.start()
        try:
            await measure(server.url, *((QUICK_ROUNDS, QUICK_CASES) if quick else (ROUNDS, CASES)))
        finally:
            serving.terminate()
            serving.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.stall", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of the two smallest cases")
    asyncio.run(main(quick=parser.parse_args().quick))
