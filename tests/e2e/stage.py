"""Server processes of a test, what they wrote to the ledger, and what they say in their heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
from server_forks import server_forks

from envbus import ClientSettings, NATSEnvClient
from envbus.bus.lifeline import Lifeline, kill_group
from envbus.bus.messages import Beat, parse_as
from envbus.bus.subjects import all_beats

HERE = Path(__file__).parent
ENV_ID = "stage-env"
READY_S = 40.0
SERVER_SETTINGS: dict[str, Any] = {"beat_interval_s": 0.1, "probe_after_s": 0.5, "orphan_grace_s": 1.0, "grace_s": 10}
CLIENT_SETTINGS: dict[str, Any] = {
    "check_interval_s": 0.2,
    "accept_timeout_s": 0.5,
    "wait_repeat_s": 0.3,
    "no_server_timeout_s": 3.0,
    "close_timeout_s": 1.0,
}


def wait_stopped(pid: int, timeout_s: float = 20) -> None:
    """Wait until every thread of a process that was sent SIGSTOP has really stopped: on a busy machine each stops
    only when it is next scheduled, and until then it goes on."""
    give_up_at = time.monotonic() + timeout_s
    while any(_thread_state(stat) not in "tT" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < give_up_at, f"process {pid} did not stop"
        time.sleep(0.002)


def _thread_state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


class ServerProcess:
    """One server in a process of its own."""

    def __init__(self, spec: dict[str, Any], log_file: Path) -> None:
        self.log_file = log_file
        self._lifeline = Lifeline()
        with open(log_file, "ab") as log:
            self.popen = server_forks().launch(spec, lifeline_fd=self._lifeline.read_fd, log_fd=log.fileno())
        self._lifeline.close_read_end()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.popen.wait(20)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        wait_stopped(self.pid)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    async def exit_code(self, timeout_s: float = 40) -> int:
        return await asyncio.to_thread(self.popen.wait, timeout_s)

    def reap(self) -> None:
        if self.popen.poll() is None:
            self.signal(signal.SIGCONT)
            kill_group(self.pid)
            self.popen.wait(20)
        self._lifeline.close()


class Stage:
    """Servers of the stage environment under one prefix on one NATS server."""

    def __init__(self, url: str, directory: Path, *, name: str | None = "stage") -> None:
        self.url = url
        self.prefix = f"t{secrets.token_hex(4)}"
        self.name = name
        self.directory = directory
        self.ledger_file = directory / f"{self.prefix}.ledger"
        self.servers: list[ServerProcess] = []

    def launch(
        self, *, max_concurrent: int = 4, settings: dict[str, Any] | None = None, **options: Any
    ) -> ServerProcess:
        """Start a server; see ready() for when it takes jobs."""
        env_args = {"ledger": str(self.ledger_file)} | options.pop("env_args", {})
        spec = {
            "env_id": ENV_ID,
            "env_args": env_args,
            "address": self.url,
            "name": self.name,
            "prefix": self.prefix,
            "max_concurrent": max_concurrent,
            "settings": SERVER_SETTINGS | (settings or {}),
        } | options
        server = ServerProcess(spec, self.directory / f"{self.prefix}-{len(self.servers)}.log")
        self.servers.append(server)
        return server

    def client(self, **options: Any) -> NATSEnvClient:
        settings = ClientSettings(**(CLIENT_SETTINGS | options.pop("settings", {})))
        options = {"name": self.name, "env_id": ENV_ID, "prefix": self.prefix, "settings": settings} | options
        return NATSEnvClient(options.pop("address", self.url), **options)

    async def ready(self, *servers: ServerProcess) -> None:
        """Wait until these servers (default: all) take jobs."""
        pids = {server.pid for server in servers or self.servers}
        async with self.beats() as beats:
            await beats.until(
                lambda now: pids <= {beat.pid for beat in now if beat.state in ("ready", "full")}, timeout_s=READY_S
            )

    @asynccontextmanager
    async def beats(self) -> AsyncIterator[BeatWatch]:
        """Listen to the servers' heartbeats with a plain NATS client."""
        connection = await nats.connect(self.url.split(","))
        try:
            watch = BeatWatch()
            await connection.subscribe(all_beats(self.prefix), cb=watch.on_message)
            yield watch
        finally:
            await connection.close()

    async def idle(self, *servers: ServerProcess) -> None:
        """Wait until these servers (default: all) run and hold nothing."""
        pids = {server.pid for server in servers or self.servers}
        async with self.beats() as beats:
            await beats.until(lambda now: pids <= {b.pid for b in now if b.in_flight == 0 and b.held_results == 0})

    def events(self, event: str | None = None, *, example_id: Any = None) -> list[dict[str, Any]]:
        """Return what the ledger says, in the order of writing."""
        if not self.ledger_file.exists():
            return []
        entries = [json.loads(line) for line in self.ledger_file.read_text().splitlines()]
        return [
            entry
            for entry in entries
            if (event is None or entry["event"] == event) and (example_id is None or entry["example_id"] == example_id)
        ]

    async def event(
        self, event: str, example_id: Any = None, *, count: int = 1, timeout_s: float = 20
    ) -> dict[str, Any]:
        """Wait until the ledger has so many of an event; returns the last of them."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = self.events(event, example_id=example_id)
            return len(found) >= count

        await becomes(there, timeout_s=timeout_s, what=f"{count} x {event} of {example_id}")
        return found[count - 1]

    def server_of(self, entry: dict[str, Any]) -> ServerProcess:
        return next(server for server in self.servers if server.pid == entry["pid"])

    def other(self, server: ServerProcess) -> ServerProcess:
        return next(other for other in self.servers if other is not server)

    def close(self) -> None:
        for server in self.servers:
            server.reap()


class BeatWatch:
    """The latest heartbeat of each server."""

    def __init__(self) -> None:
        self._beats: dict[str, Beat] = {}
        self._came = asyncio.Event()
        self.count = 0

    async def on_message(self, message: Any) -> None:
        beat = parse_as(message.data, Beat)
        self._beats[beat.server] = beat
        self.count += 1
        self._came.set()

    async def until(self, condition: Callable[[list[Beat]], bool], *, timeout_s: float = 20) -> list[Beat]:
        """Wait for beats that fulfil a condition; only beats that came after this call count."""
        self._beats.clear()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._came.clear()
                    await self._came.wait()
                    if condition(now := list(self._beats.values())):
                        return now
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s} s; last beats: {list(self._beats.values())}") from None


async def becomes(condition: Callable[[], bool], *, timeout_s: float = 20, what: str = "") -> None:
    """Poll something that only another process changes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)


def do(action: str = "slow", **fields: Any) -> Any:
    """Return an input that tells the stage environment what to do, with an id of its own."""
    return {"prompt": [], "example_id": secrets.token_hex(6), "do": action} | fields


async def run(client: NATSEnvClient, item: Any) -> Any:
    return await client.run_rollout(item, None, "m")


def leftovers(client: NATSEnvClient) -> dict[str, int]:
    """Return how much each table of a client's session still holds; all 0 once nothing is pending.

    Sends whose answer died with a server are no leftovers: late replies to them are listened for, for a bounded time.
    """
    session, bus = client._session, client._bus
    assert session is not None
    assert bus is not None
    return {
        "jobs": len(session._jobs),
        "pending": len(session._dispatch.pending()),
        "attempts": len(session._attempts),
        "holders": len(session._attempts.holders()),
        "unconfirmed": len(session._receipts),
        "routes": len(bus.connection.inbox) - 3 * bus._users - len(session._late),
    }


async def settled(client: NATSEnvClient) -> None:
    """Wait until a client's tables are empty: confirmations and checks take a moment."""
    try:
        await becomes(lambda: not any(leftovers(client).values()))
    except AssertionError:
        raise AssertionError(f"left over: {leftovers(client)}") from None
