"""The stage of a chaos run: NATS, links, servers, clients and a controller in one folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chaos_ledger as ledger
import chaos_process
import nats
import psutil
from chaos_process import HERE, Process
from chaos_proxy import Link

from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Beat, parse_as
from envbus.bus.subjects import all_beats

CLIENT_SETTINGS: dict[str, Any] = {
    "check_interval_s": 0.3,
    "accept_timeout_s": 1.0,
    "wait_repeat_s": 0.5,
    "stall_timeout_s": 4.0,
    "max_attempts": 10,
    "no_server_timeout_s": 60.0,
    "connect_timeout_s": 60.0,
    "start_window_s": 15.0,
    "close_timeout_s": 1.0,
}
SERVER_SETTINGS: dict[str, Any] = {
    "beat_interval_s": 0.3,
    "grant_ttl_s": 1.0,
    "wait_ttl_s": 5.0,
    "probe_after_s": 1.0,
    "orphan_grace_s": 2.0,
    "orphan_timeout_s": 45.0,
    "grace_s": 2.0,
    "collect_grace_s": 1.0,
}
ORPHAN_S = 6.0
"""Grace, its probes and ticks, on a slow machine."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many processes there are."""

    servers: int = 2
    managed: int = 2
    clients: int = 2
    slots: int = 6
    workers: int = 8
    hold_s: float = 20.0
    """How long a server holds a result that nobody collects."""


class Stage:
    """Everything that a run starts; close() leaves nothing of it."""

    def __init__(self, folder: Path, sizes: Sizes, *, seed: int) -> None:
        self.folder = folder
        self.sizes = sizes
        self.prefix = f"c{secrets.token_hex(4)}"
        self.nats = EmbeddedNats(log_file=folder / "nats.log")
        self.processes: dict[str, Process] = {}
        self._links: list[Link] = []
        self._seed = seed
        self._nats_port = 0

    async def open(self) -> None:
        self.nats = await EmbeddedNats.start(log_file=self.folder / "nats.log")
        self._nats_port = self.nats.port
        settings = SERVER_SETTINGS | {"hold_results_s": self.sizes.hold_s}
        variables = {f"ENVBUS_SERVER_{name.upper()}": str(value) for name, value in settings.items()}
        shared: dict[str, Any] = {"folder": self.folder, "prefix": self.prefix}
        for number in range(self.sizes.servers):
            link = await self._link()
            self._add(
                chaos_process.server(
                    f"server-{number}", link=link, slots=self.sizes.slots, variables=variables, **shared
                )
            )
        link = await self._link()
        fleet_file = self._write_fleet_file(link, variables)
        self._add(
            chaos_process.controller(
                "controller", folder=self.folder, link=link, fleet_file=fleet_file, variables=variables
            )
        )
        spec = {"prefix": self.prefix, "workers": self.sizes.workers, "settings": CLIENT_SETTINGS}
        for number in range(self.sizes.clients):
            link, seed = await self._link(), self._seed * 100 + number
            self._add(chaos_process.client(f"client-{number}", folder=self.folder, link=link, seed=seed, spec=spec))

    async def _link(self) -> Link:
        link = Link(lambda: self._nats_port)
        await link.open()
        self._links.append(link)
        return link

    def _add(self, process: Process) -> None:
        self.processes[process.name] = process

    def _write_fleet_file(self, link: Link, variables: dict[str, str]) -> Path:
        restart = "{ initial_delay_s = 0.2, max_delay_s = 1.0, max_failures = 50 }"
        liveness = "{ suspect_after_s = 4.0, stuck_after_s = 15.0, kill_after_s = 3.0 }"
        own = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
        file = self.folder / "fleet.toml"
        file.write_text(
            f'[bus]\naddress = "{link.url}"\nprefix = "{self.prefix}"\n'
            f'[controller]\nid = "chaos"\nlog_dir = "{self.folder / "managed"}"\n'
            f'[[env]]\nid = "chaos-env"\nname = "chaos"\nenv_dir_path = ["{HERE}"]\n'
            f"replicas = {self.sizes.managed}\nmax_concurrent = {self.sizes.slots}\ngrace = 2.0\n"
            f"restart = {restart}\nliveness = {liveness}\nvariables = {{ {own} }}\n"
        )
        return file

    def of(self, role: str) -> list[Process]:
        return [process for process in self.processes.values() if process.role == role]

    def start(self, role: str) -> None:
        for process in self.of(role):
            process.start()

    def managed_pids(self) -> list[int]:
        """The controller's servers that have loaded, as far as they are still there."""
        controller = self.processes["controller"].pid
        born = [entry for entry in ledger.read(self.folder, ledger.PROCESSES) if entry.get("role") == "server"]
        return [entry["pid"] for entry in born if entry["parent"] == controller and psutil.pid_exists(entry["pid"])]

    async def until_written(
        self, event: str, names: set[str], *, timeout_s: float, watch: Callable[[], object] = bool
    ) -> bool:
        """Wait until the incarnations that now run of these processes have written an event; whether they did."""
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            watch()
            pids = {self.processes[name].pid for name in names}
            written = {e["pid"] for e in ledger.read(self.folder, ledger.PROCESSES) if e["event"] == event}
            if pids <= written:
                return True
            await asyncio.sleep(0.1)
        return False

    @contextlib.asynccontextmanager
    async def beats(self) -> AsyncIterator[dict[int, Beat]]:
        """The latest heartbeat of each server process, kept up to date."""
        latest: dict[int, Beat] = {}

        async def take(message: Any) -> None:
            beat = parse_as(message.data, Beat)
            latest[beat.pid] = beat

        connection = await nats.connect(self.nats.url)
        try:
            await connection.subscribe(all_beats(self.prefix), cb=take)
            yield latest
        finally:
            await connection.close()

    async def close(self) -> list[str]:
        """Reap everything; the command lines of what should not have been there any more."""
        for process in self.processes.values():
            process.reap()
        left = await self._left()
        for link in self._links:
            await link.close()
        self.nats_signal(signal.SIGCONT)
        await self.nats.stop()
        return left

    async def _left(self) -> list[str]:
        give_up_at = time.monotonic() + 10
        while left := [p for p in chaos_process.processes_of(self.folder) if p.status() != psutil.STATUS_ZOMBIE]:
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(0.1)
        lines = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline())[:200])
                process.kill()
        return lines

    def nats_signal(self, number: signal.Signals) -> None:
        """Signal nats-server itself: the child of its guard that listens."""
        guard = self.nats._guard
        if guard is None or guard.poll() is not None:
            return
        with contextlib.suppress(psutil.Error, OSError):
            for child in psutil.Process(guard.pid).children():
                if "nats-server" in child.name():
                    os.kill(child.pid, number)
