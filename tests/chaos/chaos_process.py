"""The processes of a chaos run: started under a name that stays, killed, and started anew."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos_ledger as ledger
import psutil
from chaos_proxy import Link

from envbus.bus.lifeline import Lifeline, kill_group, spawn_group

HERE = Path(__file__).parent
STOP_S = 40.0
"""How long a process may take to end in order, its faults and a busy machine included."""


class Process:
    """A process that comes again after it was killed.

    Args:
        name: Stays the same from one incarnation to the next.
        role: server, client or controller.
        command: Makes the arguments of an incarnation from its number.
        variables: Added to its environment.

    Attributes:
        wanted: Whether it shall run; one that ends while wanted has ended by itself.
    """

    def __init__(
        self,
        name: str,
        role: str,
        *,
        folder: Path,
        link: Link,
        command: Callable[[int], list[str]],
        variables: dict[str, str],
    ) -> None:
        self.name = name
        self.role = role
        self.link = link
        self.wanted = False
        self._folder = folder
        self._command = command
        self._variables = variables
        self._number = 0
        self._log_bytes = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._lifeline: Lifeline | None = None

    @property
    def pid(self) -> int | None:
        """Of the incarnation that runs, if one does."""
        return self._popen.pid if self._popen is not None and self._popen.poll() is None else None

    @property
    def log_file(self) -> Path:
        return self._folder / f"{self.name}.log"

    @property
    def said(self) -> bytes:
        """What the present incarnation has written to its log."""
        return self.log_file.read_bytes()[self._log_bytes :]

    def start(self) -> None:
        paths = [str(HERE), str(HERE.parent.parent)]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), ledger.FOLDER_VAR: str(self._folder)}
        self._lifeline = Lifeline()
        with self.log_file.open("ab") as log:
            self._log_bytes = log.tell()
            self._popen = spawn_group(
                [sys.executable, *self._command(self._number)],
                lifeline=self._lifeline,
                env=environ | self._variables,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        self._lifeline.close_read_end()
        self._number += 1
        self.wanted = True

    def send(self, number: signal.Signals) -> None:
        if (pid := self.pid) is not None:
            os.kill(pid, number)

    async def kill(self) -> None:
        """SIGKILL; what it leaves is for the product to end."""
        self.wanted = False
        self._note_death("killed")
        self.send(signal.SIGKILL)
        await self.ended()

    async def terminate(self) -> int | None:
        """SIGTERM and wait; its exit code, None if it had to be killed."""
        self.wanted = False
        self._note_death("term")
        self.send(signal.SIGTERM)
        return await self.ended()

    async def ended(self) -> int | None:
        assert self._popen is not None
        try:
            code = await asyncio.to_thread(self._popen.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self._note_death("killed")
            kill_group(self._popen.pid)
            self._popen.wait(20)
            code = None
        self._close_lifeline()
        return code

    def reap(self) -> None:
        """Leave nothing, whatever state it is in."""
        if self._popen is not None and self._popen.poll() is None:
            kill_group(self._popen.pid)
            self._popen.wait(20)
        self._close_lifeline()

    def order(self, do: str, **more: Any) -> None:
        if (pid := self.pid) is not None:
            order(self._folder, pid, do, **more)

    def _note_death(self, how: str) -> None:
        if (pid := self.pid) is not None:
            ledger.write(self._folder, ledger.PROCESSES, event="dead", pid=pid, how=how, name=self.name)

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


def order(folder: Path, pid: int, do: str, **more: Any) -> None:
    """Tell a server or client what to do to itself; see chaos_orders."""
    ledger.write(folder, ledger.ORDERS, to=pid, do=do, **more)


def server(name: str, *, folder: Path, link: Link, prefix: str, slots: int, variables: dict[str, str]) -> Process:
    arguments = ["-m", "envbus", "serve", "chaos-env", "--name", "chaos", "--address", link.url, "--prefix", prefix]
    arguments += ["--max-concurrent", str(slots), "--log-file", str(folder / f"{name}.file.log")]
    return Process(name, "server", folder=folder, link=link, command=lambda number: arguments, variables=variables)


def client(name: str, *, folder: Path, link: Link, seed: int, spec: dict[str, Any]) -> Process:
    def command(number: int) -> list[str]:
        own = {"url": link.url, "name": name, "seed": seed * 1000 + number}
        own["log_file"] = str(folder / f"{name}.file.log")
        return [str(HERE / "chaos_client.py"), json.dumps(spec | own)]

    return Process(name, "client", folder=folder, link=link, command=command, variables={})


def controller(name: str, *, folder: Path, link: Link, fleet_file: Path, variables: dict[str, str]) -> Process:
    arguments = ["-m", "envbus", "up", str(fleet_file)]
    return Process(name, "controller", folder=folder, link=link, command=lambda number: arguments, variables=variables)


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    """All processes that a run in this folder started, directly or not."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(ledger.FOLDER_VAR) == str(folder):
                yield process
