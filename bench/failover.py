"""How long a killed server's jobs wait for their next start: kill -9 of 1 of 4 servers with 200 jobs in flight.

    python -m bench.failover [--rounds 5]

Without a controller only the missing connection tells (the clients' checks, every second); with one
it sees the process end and says so. Every job writes to a ledger when it starts and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from envbus.bus.embedded import EmbeddedNats
from envbus.client import NATSEnvClient
from envbus.settings import ClientSettings

SERVERS, SLOTS, JOBS, JOB_S = 4, 100, 200, 4.0
"""Half of the slots are free: what counts is how soon the loss is known, not when a slot frees."""
ENV = """
import asyncio, os, time

class LedgerEnv:
    requires_group_rollouts = False

    def __init__(self, ledger):
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def run_rollout(self, input, client, model, *args, **kwargs):
        os.write(self._ledger, f"{input['example_id']} {os.getpid()} {time.time()}\\n".encode())
        await asyncio.sleep(input["sleep_s"])
        return {"example_id": input["example_id"], "reward": 1.0, "pid": os.getpid()}

    async def run_group(self, group_inputs, client, model, *args, **kwargs):
        return [await self.run_rollout(item, client, model) for item in group_inputs]

    def eval_examples(self):
        return []

    async def close(self):
        pass

def load_environment(ledger):
    return LedgerEnv(ledger)
"""
ENV_NAME = "failover"
Start = tuple[int, int, float]
"""Example, process, seconds since the epoch."""


class Site:
    """One fleet in a folder of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.ledger = folder / "ledger"
        self._processes: list[subprocess.Popen[bytes]] = []
        (folder / "ledger_env.py").write_text(ENV)

    def starts(self) -> list[Start]:
        lines = [line.split() for line in self.ledger.read_text().splitlines()] if self.ledger.exists() else []
        return [(int(example), int(pid), float(at)) for example, pid, at in lines]

    def serve(self) -> None:
        """Start a server that nobody looks after."""
        command = ["serve", "ledger_env", "-a", json.dumps({"ledger": str(self.ledger)}), "--name", ENV_NAME]
        self._start([*command, "--env-dir-path", str(self.folder), "--max-concurrent", str(SLOTS)])

    def control(self) -> None:
        """Start a controller with the same servers."""
        file = self.folder / "fleet.toml"
        file.write_text(
            f'[bus]\naddress = "{self.url}"\n[controller]\nlog_dir = "{self.folder}/logs"\n'
            f'[[env]]\nid = "ledger_env"\nname = "{ENV_NAME}"\nreplicas = {SERVERS}\nmax_concurrent = {SLOTS}\n'
            f'env_dir_path = ["{self.folder}"]\nargs = {{ ledger = "{self.ledger}" }}\n'
        )
        self._start(["up", str(file)])

    def _start(self, command: list[str]) -> None:
        with (self.folder / "out.txt").open("ab") as out:
            environ = {**os.environ, "ENVBUS_URL": self.url}
            program = [sys.executable, "-m", "envbus", *command]
            self._processes.append(subprocess.Popen(program, env=environ, stdout=out, stderr=out))

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)


async def full_house(client: NATSEnvClient) -> None:
    """Wait until all servers are there and idle."""
    while sum(beat.state == "ready" and beat.in_flight == 0 for beat in await client.servers()) != SERVERS:
        pass  # servers() listens for a second


async def kill_one(site: Site, client: NATSEnvClient) -> float:
    """Start the jobs and kill the busiest server; returns seconds from there to the last new start."""
    site.ledger.write_text("")
    items: list[Any] = [{"prompt": [], "example_id": number, "sleep_s": JOB_S} for number in range(JOBS)]
    calls = [asyncio.create_task(client.run_rollout(item, None, "none")) for item in items]
    while len(site.starts()) < JOBS:  # noqa: ASYNC110 - other processes write them
        await asyncio.sleep(0.02)
    await asyncio.sleep(random.random())  # at any point between two checks
    held = Counter(pid for _, pid, _ in site.starts())
    victim = max(held, key=lambda pid: held[pid])
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    outputs = await asyncio.gather(*calls)
    assert [output["example_id"] for output in outputs] == list(range(JOBS))
    lost = sorted(example for example, pid, _ in site.starts() if pid == victim)
    again = sorted((example, at) for example, _, at in site.starts() if at > killed_at)
    assert [example for example, _ in again] == lost, "not exactly the killed server's jobs ran again"
    return max(at for _, at in again) - killed_at


async def measure(site: Site, *, controlled: bool, rounds: int) -> list[float]:
    times_s = []
    with closing(site):
        if controlled:
            site.control()
        async with NATSEnvClient(site.url, ENV_NAME) as client:
            for number in range(rounds):
                if not controlled:
                    for _ in range(SERVERS if number == 0 else 1):
                        site.serve()
                await full_house(client)
                times_s.append(await kill_one(site, client))
    return times_s


async def main() -> None:
    parser = argparse.ArgumentParser(description="Time from a server's death to the last new start of its jobs.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.getLogger("envbus").setLevel(logging.ERROR)
    interval_s = ClientSettings().check_interval_s
    print(f"{SERVERS} servers, {JOBS} jobs of {JOB_S:g} s, one killed; seconds to the last new start, {rounds} rounds")
    print(f"{'':22}{'median':>8}{'longest':>9}{'median / check interval':>25}")
    async with EmbeddedNats() as nats:
        for name, controlled in (("without a controller", False), ("with a controller", True)):
            with tempfile.TemporaryDirectory() as folder:
                times_s = await measure(Site(Path(folder), nats.url), controlled=controlled, rounds=rounds)
            median_s = statistics.median(times_s)
            print(f"{name:22}{median_s:8.2f}{max(times_s):9.2f}{median_s / interval_s:25.2f}")


if __name__ == "__main__":
    asyncio.run(main())
