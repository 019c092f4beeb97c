"""Servers of environments that were not made for envbus, started by ``envbus serve``, and clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envbus import ClientConfig, NATSEnvClient
from envbus.bus.lifeline import Lifeline, kill_group, spawn_group

ENVS = Path(__file__).parent / "envs"
READY_S = 120.0
"""Importing the library and its dependencies takes long on a busy machine."""


class Served:
    """One server process."""

    def __init__(self, command: list[str], log_file: Path, environ: Mapping[str, str]) -> None:
        self.log_file = log_file
        self._lifeline = Lifeline()
        with open(log_file, "ab") as log:
            self.process = spawn_group(command, lifeline=self._lifeline, env=environ, stdout=log, stderr=log)
        self._lifeline.close_read_end()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self, timeout_s: float = 60) -> int:
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def reap(self) -> None:
        if self.process.poll() is None:
            kill_group(self.process.pid)
            self.process.wait(10)
        self._lifeline.close()


class Fleet:
    """The servers of a test, and what their environments wrote to the ledger."""

    def __init__(self, url: str, prefix: str, folder: Path) -> None:
        self.url = url
        self.prefix = prefix
        self.folder = folder
        self.ledger = folder / "ledger"
        self._served: list[Served] = []

    def serve(self, env_id: str, env_args: Mapping[str, Any] | None = None, *options: str, **variables: str) -> Served:
        """Start a server; NATSEnvClient.wait_for_server() says when it is ready."""
        command = [sys.executable, "-P", "-m", "envbus", "serve", env_id, "--address", self.url]
        command += ["--prefix", self.prefix, "-a", json.dumps(env_args or {})]
        command += ["--allow-url", "http://127.0.0.1:*", *options]
        path = os.pathsep.join([str(ENVS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": path, "LEDGER": str(self.ledger), **variables}
        served = Served(command, self.folder / f"server-{len(self._served)}.log", environ)
        self._served.append(served)
        return served

    def client(self, env_id: str, env_args: Mapping[str, Any] | None = None) -> NATSEnvClient:
        return NATSEnvClient(self.url, env_id, env_args=env_args, prefix=self.prefix)

    def events(self, event: str | None = None) -> list[str]:
        """Lines of the ledger, or those of one event: ``event about``."""
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [line for line in lines if event is None or line.split()[0] == event]

    async def event(self, event: str, *, count: int = 1, timeout_s: float = READY_S / 2) -> None:
        """Wait until the ledger has so many of an event."""
        deadline = time.monotonic() + timeout_s
        while len(self.events(event)) < count:
            assert time.monotonic() < deadline, f"no {count} x {event} within {timeout_s} s; there is {self.events()}"
            await asyncio.sleep(0.02)

    def reap(self) -> None:
        for served in self._served:
            served.reap()


def endpoint(base_url: str, **settings: Any) -> ClientConfig:
    return ClientConfig(api_base_url=base_url, **{"api_key_var": None, **settings})


@contextlib.contextmanager
def importable_envs() -> Iterator[None]:
    """The tests' own environments can be loaded here too."""
    sys.path.insert(0, str(ENVS))
    try:
        yield
    finally:
        sys.path.remove(str(ENVS))
