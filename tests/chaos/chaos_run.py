"""One chaos run from its seed to its report: warm up, faults, calm, judgement."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_ledger as ledger
import psutil
from chaos_checks import Limits, Record, Window, hanging, violations
from chaos_faults import ORDERLY, Faults
from chaos_plan import MANAGED, Scale, make_plan
from chaos_stage import CLIENT_SETTINGS, ORPHAN_S, Sizes, Stage

WARM_S = 90.0
RECOVERY_S = 60.0
QUIET_S = 20.0
"""On top of the time for which servers hold results and failures of copies that their clients never heard of."""
SHORT = Scale(every_s=1.0, longest_stop_s=7.0, longest_outage_s=5.0, longest_other_s=5.0)
LONG = Scale(every_s=2.5, longest_stop_s=40.0, longest_outage_s=30.0, longest_other_s=20.0)
LIMITS = Limits(max_starts=CLIENT_SETTINGS["max_attempts"], orphan_s=ORPHAN_S)


class NotWarmError(RuntimeError):
    """The run did not come as far as its faults."""


@dataclass(slots=True)
class Report:
    """What came of a run."""

    seed: int
    duration_s: float
    planned: int = 0
    """Faults: those that were carried out and those that were skipped."""
    faults: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    reruns: int = 0
    most_starts: int = 0
    recovery_s: float = 0.0
    rss_mb: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


async def chaos(
    folder: Path,
    *,
    seed: int,
    duration_s: float,
    scale: Scale = SHORT,
    sizes: Sizes = Sizes(),  # noqa: B008 - frozen
    say: Callable[[str], None] = print,
) -> Report:
    """Run it; ledgers and logs stay in the folder."""
    plan = make_plan(seed, duration_s=duration_s, names=names_of(sizes), scale=scale)
    say(f"seed {seed}, {len(plan)} faults in {duration_s:g} s:")
    for fault in plan:
        say(f"  {fault}")
    stage = Stage(folder, sizes, seed=seed)
    faults = Faults(stage, seed=seed, say=say)
    record = Record(windows=faults.windows)
    report = Report(seed, duration_s, planned=len(plan))
    try:
        await stage.open()
        await _warm_up(stage, faults)
        say("warm; the faults begin")
        await faults.run(plan)
        say("the faults are over")
        report.recovery_s = await _calm_down(stage, faults, record, say)
        await _stop(stage, faults, say)
    finally:
        record.left += await stage.close()
    _read_ledgers(stage.folder, record, faults)
    report.violations = violations(record, LIMITS)
    _count(record, faults, report)
    return report


def names_of(sizes: Sizes) -> dict[str, list[str]]:
    """Return the targets of faults by role."""
    return {
        "server": [f"server-{number}" for number in range(sizes.servers)],
        "managed": [MANAGED] if sizes.managed else [],
        "client": [f"client-{number}" for number in range(sizes.clients)],
        "controller": ["controller"],
        "nats": ["nats"],
    }


async def _warm_up(stage: Stage, faults: Faults) -> None:
    stage.start("server")
    stage.start("controller")
    stage.start("client")
    names = {process.name for process in stage.of("client")}

    def check() -> None:
        faults.check_ends()
        if faults.exits:
            raise NotWarmError("; ".join(faults.exits))

    if not await stage.until_written("warm", names, timeout_s=WARM_S, watch=check):
        raise NotWarmError(f"the clients' first calls did not end within {WARM_S:g} s, see {stage.folder}")
    for process in stage.of("server"):
        process.order("vitals", tag="base")
    (stage.folder / "go").touch()


async def _calm_down(stage: Stage, faults: Faults, record: Record, say: Callable[[str], None]) -> float:
    """Let the clients come to their end, then see that the servers are empty; the seconds that took."""
    began_at = time.monotonic()
    await stage.until_written("born", {p.name for p in stage.of("client")}, timeout_s=RECOVERY_S)
    for process in stage.of("client"):
        process.order("quit")
    names = {process.name for process in stage.of("client")}
    if not await stage.until_written("quiet", names, timeout_s=RECOVERY_S, watch=faults.check_ends):
        _read_ledgers(stage.folder, record, faults)
        for entry in hanging(record):
            say(f"HANGS: {entry}")
    took_s = time.monotonic() - began_at
    record.beats = await _quiet_beats(stage)
    await _end_vitals(stage)
    return took_s


async def _quiet_beats(stage: Stage) -> dict[str, dict[str, int]]:
    """The counts of all servers once all are zero, or as they are when the time for that is over."""
    give_up_at = time.monotonic() + QUIET_S + 2 * stage.sizes.hold_s
    async with stage.beats() as beats:
        while True:
            await asyncio.sleep(0.2)
            here = {pid: beat for pid, beat in beats.items() if psutil.pid_exists(pid)}
            counts = {
                f"server process {pid}": {
                    "running": beat.in_flight,
                    "held": beat.held_results,
                    "waiting": beat.waiting_jobs,
                }
                for pid, beat in here.items()
            }
            enough = len(counts) >= stage.sizes.servers + stage.sizes.managed
            if (enough and not any(any(c.values()) for c in counts.values())) or time.monotonic() > give_up_at:
                return counts if enough else counts | {f"servers seen: {len(counts)}": {"missing": 1}}


async def _end_vitals(stage: Stage) -> None:
    pids = stage.managed_pids() + [p.pid for p in stage.processes.values() if p.role != "controller" and p.pid]
    for pid in pids:
        ledger.write(stage.folder, ledger.ORDERS, to=pid, do="vitals", tag="end")
    give_up_at = time.monotonic() + QUIET_S
    while time.monotonic() < give_up_at:
        told = {entry["pid"] for entry in ledger.read(stage.folder, ledger.VITALS) if entry["tag"] == "end"}
        if set(pids) <= told:
            return
        await asyncio.sleep(0.1)


async def _stop(stage: Stage, faults: Faults, say: Callable[[str], None]) -> None:
    for process in stage.of("client"):
        process.order("leave")
    running = [process for process in stage.processes.values() if process.pid is not None]
    for process in running:
        process.wanted = False
    codes = await asyncio.gather(*(p.ended() if p.role == "client" else p.terminate() for p in running))
    for process, code in zip(running, codes, strict=True):
        if code not in ORDERLY:
            faults.exits.append(f"{process.name} ended with {code} at the end, see {process.log_file}")
    say("all processes have ended")


def _read_ledgers(folder: Path, record: Record, faults: Faults) -> None:
    record.calls = ledger.read(folder, ledger.CALLS)
    record.attempts = ledger.read(folder, ledger.ATTEMPTS)
    record.vitals = ledger.read(folder, ledger.VITALS)
    record.exits = faults.exits
    owners: dict[int, str] = {}
    for entry in ledger.read(folder, ledger.PROCESSES):
        pid = entry["pid"]
        if entry["event"] == "born":
            record.roles[pid] = entry["role"]
            owners.setdefault(pid, entry.get("name", "controller"))
        elif entry["event"] == "dead":
            (record.terminated if entry["how"] == "term" else record.killed).add(pid)
            owners[pid] = entry["name"] if entry["name"] != "managed" else "controller"
            record.windows.append(Window("#dead process", f"#{pid}", entry["at"], entry["at"]))
    record.names |= owners


def _count(record: Record, faults: Faults, report: Report) -> None:
    starts = Counter(entry["key"] for entry in record.attempts if entry["event"] == "start")
    report.faults = dict(sorted(faults.done.items()))
    report.skipped = dict(sorted(faults.skipped.items()))
    report.calls = dict(Counter(entry["kind"] for entry in record.calls if entry["event"] == "begin"))
    report.outcomes = dict(Counter(entry["outcome"] for entry in record.calls if entry["event"] == "end"))
    report.attempts = sum(starts.values())
    report.reruns = report.attempts - len(starts)
    report.most_starts = max(starts.values(), default=0)
    for tag in ("base", "end"):
        for role in ("server", "client"):
            rss = [e["rss"] for e in record.vitals if e["tag"] == tag and record.roles.get(e["pid"]) == role]
            report.rss_mb[f"{role} {tag}"] = max(rss, default=0) // 1_000_000


def as_lines(report: Report) -> list[str]:
    """Return the report as text."""

    def table(values: dict[str, Any]) -> str:
        return ", ".join(f"{name} {count}" for name, count in values.items()) or "none"

    return [
        f"seed {report.seed}, {report.duration_s:g} s of faults, calm after {report.recovery_s:.1f} s",
        f"faults: {sum(report.faults.values())} of {report.planned} planned: {table(report.faults)}",
        f"skipped, for their target was not there: {sum(report.skipped.values())}: {table(report.skipped)}",
        f"calls: {sum(report.calls.values())}: {table(report.calls)}",
        f"outcomes: {table(report.outcomes)}",
        f"attempts: {report.attempts}, of these again: {report.reruns}, most for one rollout: {report.most_starts}",
        f"memory (MB): {table(report.rss_mb)}",
        f"violations: {len(report.violations)}",
        *(f"  {line}" for line in report.violations),
    ]
