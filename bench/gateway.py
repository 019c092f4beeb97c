"""Rollouts per second of the library's own client through a gateway, beside its own server, in the same run.

    python -m bench.gateway

Needs verifiers: with 0.1 it measures ZMQEnvClient, with 0.4 EnvClient. The environment's rollouts end at once, so this
is what the path costs; a rollout that calls a model takes seconds.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.roundtrip import rate
from envbus.bus.embedded import EmbeddedNats

ENVS = Path(__file__).parent / "instant"
ROUNDS = 3
CASES = [(1, 200), (64, 1_000), (512, 2_000)]
"""Concurrency and calls."""
READY_S = 120.0
STOCK_CLASSIC = "from verifiers.serve import ZMQEnvServer as S; S.run_server('instant-classic', address={address!r})"
STOCK_TASKSET = """
import verifiers.v1 as vf
from verifiers.v1.serve.server import EnvServer
EnvServer.run_server(config=vf.resolve_env_config({{"taskset": {{"id": "instant-taskset"}}}}), address={address!r})
"""
Call = Callable[[], Awaitable[Any]]


def start(*command: str, **options: Any) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ENVS), str(ENVS.parent.parent)])}
    return subprocess.Popen([sys.executable, *command], env=environ, text=True, stderr=subprocess.DEVNULL, **options)


def classic(address: str) -> tuple[Any, Call]:
    from verifiers.serve import ZMQEnvClient
    from verifiers.types import ClientConfig

    client = ZMQEnvClient(address)
    row: Any = {"prompt": [{"role": "user", "content": "Add 1 and 2."}], "example_id": 0}
    config = ClientConfig(api_base_url="http://127.0.0.1:1/v1", api_key_var="EMPTY")
    return client, lambda: client.run_rollout(row, config, "m", {})


def taskset(address: str) -> tuple[Any, Call]:
    import verifiers.v1 as vf
    from verifiers.v1.serve.client import EnvClient

    client = EnvClient(address)
    config = vf.EvalClientConfig(base_url="http://127.0.0.1:1/v1", api_key_var="EMPTY")
    data = {"idx": 0, "prompt": "Add 1 and 2."}
    return client, lambda: client.run(config, "m", vf.SamplingConfig(), data)


async def main() -> None:
    is_new = find_spec("verifiers.v1.serve") is not None
    env_id, connect, stock = (
        ("instant-taskset", taskset, STOCK_TASKSET) if is_new else ("instant-classic", classic, STOCK_CLASSIC)
    )
    async with EmbeddedNats() as nats:
        folder = tempfile.mkdtemp()
        stock_address = f"ipc://{folder}/stock"
        serve = ["-m", "envbus", "serve", env_id, "--address", nats.url, "--allow-url", "http://127.0.0.1:*"]
        serve += ["--max-concurrent", "1024"]
        gateway = ["-m", "envbus", "gateway", "--address", nats.url, "--listen", "tcp://127.0.0.1:0", "--env", env_id]
        processes = [
            start("-c", stock.format(address=stock_address), stdout=subprocess.DEVNULL),
            start(*serve, stdout=subprocess.DEVNULL),
            start(*gateway, stdout=subprocess.PIPE),
        ]
        try:
            line = await asyncio.to_thread(processes[2].stdout.readline)
            await measure(connect(line.split(" is at ")[1].strip()), connect(stock_address))
        finally:
            for process in processes:
                process.terminate()
                process.wait()
            if processes[2].stdout is not None:
                processes[2].stdout.close()
            shutil.rmtree(folder)


async def measure(ours: tuple[Any, Call], theirs: tuple[Any, Call]) -> None:
    for client, _ in (ours, theirs):
        await client.wait_for_server_startup(timeout=READY_S)
    print(f"{'':14}{'gateway/s':>12}{'own server/s':>14}{'ratio':>8}   median of {ROUNDS} rounds")
    for concurrency, calls in CASES:
        rates: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for kept, (_, call) in zip(rates, (ours, theirs), strict=True):
                kept.append(await rate(call, concurrency, calls))
        a, b = (statistics.median(kept) for kept in rates)
        print(f"{f'{concurrency} at once':14}{a:12,.0f}{b:14,.0f}{a / b:8.2f}")
    for client, _ in (ours, theirs):
        await client.close()


if __name__ == "__main__":
    asyncio.run(main())
