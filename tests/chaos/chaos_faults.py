"""Carries out the faults of a plan on a stage, and writes down when each really was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import chaos_ledger as ledger
import chaos_process
import psutil
from chaos_checks import Window
from chaos_plan import MANAGED, Fault
from chaos_process import Process
from chaos_stage import Stage

ORDERLY = (0, 130)
"""Exit codes after a SIGTERM; 130: before the program had anything to stop."""
NO_NATS = b"error[bus_unreachable]"
"""A controller that finds no NATS when it starts says so and ends."""
SETTLE_S = 8.0
"""After a process or NATS was away, others may need this long to be back in step."""


class Faults:
    """Runs a plan.

    Attributes:
        done: How often each kind was carried out.
        skipped: How often each kind was left out, because its target was not there; with ``done`` it is the plan.
        windows: When things were wrong.
        exits: What is wrong with how processes ended.
    """

    def __init__(self, stage: Stage, *, seed: int, say: Callable[[str], None]) -> None:
        self._stage = stage
        self._say = say
        self._rng = random.Random(seed)
        self._busy: set[str] = set()
        self.done: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.windows: list[Window] = []
        self.exits: list[str] = []

    async def run(self, plan: list[Fault]) -> None:
        """Carry out all faults at their times; everything is as it should be at the end."""
        began_at = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in plan:
                await asyncio.sleep(max(0.0, began_at + fault.at_s - time.monotonic()))
                self.check_ends()
                tasks.create_task(self._one(fault))
        self.check_ends()

    def check_ends(self) -> None:
        """Note and bring back processes that ended though nobody ended them."""
        for process in self._stage.processes.values():
            if process.wanted and process.pid is None:
                if process.role == "controller" and NO_NATS in process.said:
                    process.start()  # as whoever supervises it would
                    continue
                last = (process.said.decode(errors="replace").splitlines() or ["(nothing)"])[-1]
                self.exits.append(f"{process.name} ended by itself, see {process.log_file}; it said last: {last}")
                process.wanted = False

    async def _one(self, fault: Fault) -> None:
        self._say(str(fault))
        from_s = time.monotonic()
        target = fault.target
        if fault.role == "nats":
            await self._nats(fault)
        elif fault.role == MANAGED:
            pids = self._stage.managed_pids()
            if not pids:
                return self._skip(fault, "no managed server")
            pid = self._rng.choice(pids)
            target = "controller"
            await self._managed(fault, pid)
        else:
            process = self._stage.processes[fault.target]
            if process.pid is None or target in self._busy:
                return self._skip(fault, f"{target} is not there yet")  # its last fault took longer than was planned
            self._busy.add(target)
            try:
                await self._process(fault, process)
            finally:
                self._busy.discard(target)
        self.done[fault.label] += 1
        self.windows.append(Window(fault.label, target, from_s, time.monotonic() + SETTLE_S))

    def _skip(self, fault: Fault, why: str) -> None:
        self._say(f"           {fault.kind} {fault.target} skipped: {why}")
        self.skipped[fault.label] += 1

    async def _nats(self, fault: Fault) -> None:
        nats = self._stage.nats
        if fault.kind == "kill":
            await nats.kill()
            await asyncio.sleep(fault.for_s)
            await nats.restart()
        else:
            self._stage.nats_signal(signal.SIGSTOP)
            await asyncio.sleep(fault.for_s)
            self._stage.nats_signal(signal.SIGCONT)

    async def _managed(self, fault: Fault, pid: int) -> None:
        folder = self._stage.folder
        match fault.kind:
            case "kill":
                ledger.write(folder, ledger.PROCESSES, event="dead", pid=pid, how="killed", name=MANAGED)
                _signal(pid, signal.SIGKILL)
            case "term":
                _signal(pid, signal.SIGTERM)
            case "stop":
                _signal(pid, signal.SIGSTOP)
                await asyncio.sleep(fault.for_s)
                _signal(pid, signal.SIGCONT)
                return
            case _:
                chaos_process.order(folder, pid, fault.kind, amount=fault.amount, for_s=fault.for_s)
        await asyncio.sleep(fault.for_s)

    async def _process(self, fault: Fault, process: Process) -> None:
        match fault.kind:
            case "kill":
                self._note_managed_deaths(process)
                await process.kill()
                await asyncio.sleep(fault.for_s)
                process.start()
            case "term":
                pid = process.pid
                early = not self._has_begun(process)
                if (code := await process.terminate()) not in ORDERLY and not (early and code == -signal.SIGTERM):
                    self.exits.append(f"{process.name} ({pid}) ended with {code} after SIGTERM, see {process.log_file}")
                await asyncio.sleep(fault.for_s)
                process.start()
            case "stop":
                process.send(signal.SIGSTOP)
                await asyncio.sleep(fault.for_s)
                process.send(signal.SIGCONT)
            case "cut" | "half-open" | "delay" | "throttle":
                await self._link(fault, process)
            case _:
                process.order(fault.kind, amount=fault.amount, for_s=fault.for_s)
                await asyncio.sleep(fault.for_s)

    async def _link(self, fault: Fault, process: Process) -> None:
        link = process.link
        match fault.kind:
            case "cut":
                link.cut = True
                link.reset()
            case "half-open":
                link.half_open = True
            case "delay":
                link.delay_s = fault.amount
            case "throttle":
                link.bytes_per_s = fault.amount
        await asyncio.sleep(fault.for_s)
        link.restore()

    def _has_begun(self, process: Process) -> bool:
        """Whether it is past its imports: before that a signal ends it as it ends any program."""
        if process.role == "controller":
            return bool(process.said)
        return any(entry["pid"] == process.pid for entry in ledger.read(self._stage.folder, ledger.PROCESSES))

    def _note_managed_deaths(self, process: Process) -> None:
        """Servers end with a controller that is killed; they may not have the time to write how."""
        if process.role == "controller":
            for pid in self._stage.managed_pids():
                ledger.write(self._stage.folder, ledger.PROCESSES, event="dead", pid=pid, how="orphaned", name=MANAGED)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, psutil.Error):
        os.kill(pid, number)
