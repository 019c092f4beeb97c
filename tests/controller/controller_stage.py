"""Starts controllers, in this process or through the command line, and looks at what they run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from envbus.bus.address import resolve_bus_options
from envbus.bus.connection import Connection
from envbus.bus.control_messages import ControllerBeat, ProcessReport, StatusRequest
from envbus.bus.messages import WireMessage, pack, parse
from envbus.bus.subjects import controller
from envbus.client import NATSEnvClient
from envbus.controller.controller import Controller
from envbus.controller.instructions import Note
from envbus.controller.spec import FleetSpec, read_fleet_file
from envbus.errors import EnvbusError
from envbus.settings import ClientSettings

ENVS = Path(__file__).parent / "envs"
MARK = "ENVBUS_TEST_MARK"
QUICK_RESTART = {"initial_delay_s": 0.2, "max_delay_s": 1, "max_failures": 2}


def env_table(name: str, **fields: Any) -> dict[str, Any]:
    """An ``[[env]]`` of the fleet environment."""
    return {"id": "fleet-env", "name": name, "env_dir_path": [str(ENVS)], "restart": QUICK_RESTART} | fields


class Fleet:
    """One fleet file, and the controllers that are started with it.

    Every process that comes of it carries a mark; whatever a failed test leaves is killed.
    """

    def __init__(self, folder: Path, address: str, prefix: str, *, controller_id: str = "one") -> None:
        self.folder = folder
        self.address = address
        self.prefix = prefix
        self.controller_id = controller_id
        self.mark = secrets.token_hex(8)
        self.notes: list[Note] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def write(self, *envs: dict[str, Any], **controller_fields: Any) -> Path:
        values: dict[str, Any] = {
            "bus": {"address": self.address, "prefix": self.prefix},
            "controller": {"id": self.controller_id, "log_dir": str(self.folder / "logs"), **controller_fields},
            "env": [env | {"variables": {MARK: self.mark, **env.get("variables", {})}} for env in envs],
        }
        file = self.folder / f"{self.controller_id}.toml"
        lines = [f"[{table}]\n{_keys(values[table])}" for table in ("bus", "controller")]
        file.write_text("\n".join([*lines, *(f"[[env]]\n{_keys(env)}" for env in values["env"])]))
        return file

    def spec(self, *envs: dict[str, Any], **controller_fields: Any) -> FleetSpec:
        return read_fleet_file(self.write(*envs, **controller_fields))

    def up(self, *options: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start ``envbus up`` with the file, by another command if need be; its output goes to up.txt."""
        with (self.folder / "up.txt").open("ab") as out:
            file = str(self.folder / f"{self.controller_id}.toml")
            process = subprocess.Popen(
                [*inside, sys.executable, "-P", "-m", "envbus", "up", file, *options],
                cwd=self.folder,
                env={**os.environ, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    @property
    def said(self) -> str:
        return (self.folder / "up.txt").read_text()

    def processes(self) -> list[psutil.Process]:
        """All that still run, zombies included if they are not a controller's."""
        return list(_marked(self.mark))

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in self._started:
            started.kill()
            started.wait(20)


@contextlib.asynccontextmanager
async def running(fleet: Fleet, spec: FleetSpec) -> AsyncIterator[Controller]:
    """A controller in this process; it is stopped at the end."""
    one = Controller(spec, tell=fleet.notes.append)
    task = asyncio.create_task(one.run())
    try:
        await wait_until(lambda: task.done() or any("runs; logs" in note.text for note in fleet.notes))
        if task.done():
            await task
        yield one
    finally:
        if not task.done():
            one.stop()
        await asyncio.wait_for(task, 30)


@contextlib.asynccontextmanager
async def operator(fleet: Fleet) -> AsyncIterator[Operator]:
    connection = Connection(resolve_bus_options(fleet.address), name="test operator")
    await connection.open(timeout_s=20)
    try:
        yield Operator(connection, fleet)
    finally:
        await connection.close()


class Operator:
    """Asks the controller of a fleet over the bus."""

    def __init__(self, connection: Connection, fleet: Fleet) -> None:
        self.connection = connection
        self.fleet = fleet

    async def ask(self, request: WireMessage) -> WireMessage:
        subject = controller(self.fleet.controller_id, self.fleet.prefix)
        return parse(await self.connection.request(subject, pack(request), timeout_s=15))

    async def status(self) -> ControllerBeat:
        answer = await self.ask(StatusRequest())
        assert isinstance(answer, ControllerBeat)
        return answer

    async def until(
        self, condition: Callable[[list[ProcessReport]], bool], *, timeout_s: float = 90
    ) -> list[ProcessReport]:
        """Ask until the reports of its processes are as wanted."""
        reports: list[ProcessReport] = []
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(EnvbusError, TimeoutError):
                reports = (await self.status()).processes
                if condition(reports):
                    return reports
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s: {reports}; {[note.text for note in self.fleet.notes]}")

    async def until_running(self, count: int) -> list[ProcessReport]:
        return await self.until(lambda reports: [r.state for r in reports] == ["running"] * count)


def client_of(fleet: Fleet, name: str) -> NATSEnvClient:
    settings = ClientSettings(no_server_timeout_s=20, max_attempts=10)
    return NATSEnvClient(fleet.address, name=name, prefix=fleet.prefix, settings=settings)


async def rollouts(client: NATSEnvClient, count: int, *, sleep_s: float = 0.0, **fields: Any) -> list[int]:
    """Run so many at once; the pids that served them. All must end with a result."""
    items: list[Any] = [{"prompt": [], "example_id": n, "sleep_s": sleep_s} | fields for n in range(count)]
    outputs: list[Any] = await asyncio.gather(*(client.run_rollout(item, None, "m") for item in items))
    assert [output["example_id"] for output in outputs] == list(range(count))
    return [output["pid"] for output in outputs]


async def steady_rollouts(client: NATSEnvClient, until: asyncio.Event, *, at_once: int, sleep_s: float) -> set[int]:
    """Keep so many running until the event; the pids that served them. All must end with a result."""

    async def again_and_again() -> set[int]:
        served: set[int] = set()
        while not until.is_set():
            served |= set(await rollouts(client, 1, sleep_s=sleep_s))
        return served

    return set().union(*await asyncio.gather(*(again_and_again() for _ in range(at_once))))


def kill(report: ProcessReport, number: int = signal.SIGKILL) -> None:
    assert report.pid is not None
    os.kill(report.pid, number)


def pids(reports: list[ProcessReport]) -> set[int | None]:
    return {report.pid for report in reports}


async def wait_until(condition: Callable[[], object], *, timeout_s: float = 90, what: Callable[[], str] = str) -> None:
    """Poll something that only another process changes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what()}"
        await asyncio.sleep(0.02)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                yield process


def _keys(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)
