"""One place with servers of the command line, and commands of an operator about them."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

from cli_process import ENVS, QUICK, Cli, Ended, wait_for_line

from envbus.controller.operator import Operator


def as_json(ended: Ended) -> Any:
    """What a command that went well wrote."""
    assert ended.code == 0, ended.err + ended.out
    return json.loads(ended.out)


@dataclass
class Site:
    """Servers of the command line under one prefix, and commands of an operator about them."""

    cli: Cli
    url: str
    prefix: str = field(default_factory=lambda: f"t{secrets.token_hex(4)}")
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        return {"NATS_URL": self.url, **QUICK}

    def serve(self, *servers: Sequence[str]) -> list[subprocess.Popen[str]]:
        """Start servers, each with the arguments of ``envbus serve``, and wait until they are ready."""
        always = ("--env-dir-path", str(ENVS), "--allow-url", "http://127.0.0.1:*")
        processes = [self._launch("serve", *server, *always) for server in servers]
        for process in processes:
            wait_for_line(process, "is ready", stream="stderr")
        return processes

    def start(self, command: str, *options: str, until: str, stream: str = "stdout") -> subprocess.Popen[str]:
        """Start something that goes on, and wait until it says so."""
        process = self._launch(command, *options)
        wait_for_line(process, until, stream=stream)
        return process

    def _launch(self, command: str, *options: str) -> subprocess.Popen[str]:
        process = self.cli.start(command, *options, "--prefix", self.prefix, variables=self.variables)
        self.started.append(process)
        return process

    def run(self, command: str, *options: str, fresh: bool = False) -> Ended:
        return self.cli.run(command, *options, "--prefix", self.prefix, variables=self.variables, fresh=fresh)

    def run_all(self, *commands: Sequence[str]) -> list[Ended]:
        """Run commands that have nothing to do with each other at the same time."""
        return self.cli.run_all(([*command, "--prefix", self.prefix] for command in commands), variables=self.variables)

    def json(self, command: str, *options: str) -> Any:
        return as_json(self.run(command, *options, "--json"))

    def server_id(self, env: str) -> str:
        """Id of the one server of the env that takes jobs."""
        [found] = [
            server["server"]
            for server in self.json("ls", env)["servers"]
            if server["state"] in ("ready", "full", "lagging")
        ]
        return str(found)

    def close(self) -> None:
        for process in self.started:
            process.terminate()
        for process in self.started:
            process.communicate(timeout=60)
        self.cli.kill_all()

    def until(self, condition: Any, *, limit_s: float) -> dict[str, Any]:
        """Watch the fleet until what ``envbus ls --json`` shows, rates aside, fulfils a condition; returns that."""
        return asyncio.run(self._until(condition, limit_s))

    async def _until(self, condition: Any, limit_s: float) -> dict[str, Any]:
        async with Operator(self.url, prefix=self.prefix) as operator:
            deadline = time.monotonic() + limit_s
            while True:
                view: dict[str, Any] = (await operator.survey()).as_json()
                if condition(view):
                    return view
                assert time.monotonic() < deadline, view
                await asyncio.sleep(0.1)
