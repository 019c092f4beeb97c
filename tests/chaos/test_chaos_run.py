"""A minute of chaos: everything dies, stalls or is cut off, and every call ends once, with nothing left over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from chaos_faults import Faults
from chaos_plan import KINDS, MANAGED, Fault, make_plan
from chaos_run import SHORT, NotWarmError, as_lines, chaos, names_of
from chaos_stage import Sizes, Stage

SEED = 394
FAULTS_S = 44.0
"""With the warm-up, the calm and the stops it is about a minute."""
SIZES = Sizes(servers=2, managed=2, clients=2)


def test_every_kind_of_fault_has_its_turn() -> None:
    plan = make_plan(SEED, duration_s=FAULTS_S, names=names_of(SIZES), scale=SHORT)
    assert {(fault.role, fault.kind) for fault in plan} == {
        (role, kind) for role, kinds in KINDS.items() for kind in kinds
    }


@pytest.mark.timeout(400)
async def test_a_minute_of_chaos_loses_doubles_and_leaks_nothing(tmp_path: Path) -> None:
    """P01, P07, P08, P11, P12, P14, P24, P33 and P46, all at once."""
    report = await chaos(tmp_path, seed=SEED, duration_s=FAULTS_S, sizes=SIZES)
    print("\n".join(as_lines(report)))
    assert not report.violations, "\n".join(as_lines(report))
    assert report.outcomes["result"] > 50
    assert len(report.faults) > 25
    assert sum(report.faults.values()) + sum(report.skipped.values()) == report.planned


async def test_a_run_whose_server_does_not_start_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last line of its log, instead of after the time for the warm-up."""
    monkeypatch.setenv("ENVBUS_SERVER_NO_SUCH_SETTING", "1")
    with pytest.raises(NotWarmError, match=r"ended by itself, see .*; it said last: .*NO_SUCH_SETTING"):
        await chaos(tmp_path, seed=SEED, duration_s=1.0, sizes=Sizes(servers=1, managed=0, clients=1))


async def test_a_fault_without_a_target_is_said_and_counted() -> None:
    stage, said = SimpleNamespace(managed_pids=list, processes={}), list[str]()
    faults = Faults(cast(Stage, stage), seed=1, say=said.append)
    await faults.run([Fault(0.0, "kill", MANAGED, MANAGED, 0.1)])
    assert (faults.done, faults.skipped) == ({}, {"kill managed": 1})
    assert "skipped: no managed server" in said[-1]
