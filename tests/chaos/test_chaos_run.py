"""A minute of chaos: everything dies, stalls or is cut off, and every call ends once, with nothing left over."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_plan import KINDS, make_plan
from chaos_run import SHORT, as_lines, chaos, names_of
from chaos_stage import Sizes

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
