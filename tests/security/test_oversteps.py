"""Whoever publishes or subscribes to what is none of its business gets nowhere; without the protection it does."""

from __future__ import annotations

import pytest
from attacked_bus import AttackedBus, generated
from oversteps import OVERSTEPS


@pytest.mark.parametrize("kind", OVERSTEPS)
async def test_an_overstep(mode: str, shared_bus: AttackedBus, kind: str) -> None:
    await shared_bus.use(generated(mode))
    succeeded = [str(overstep) for overstep in OVERSTEPS[kind] if await overstep.succeeds(shared_bus)]
    assert succeeded == []


@pytest.mark.parametrize("kind", OVERSTEPS)
async def test_an_overstep_where_nothing_stops_it(mode: str, shared_bus: AttackedBus, kind: str) -> None:
    for overstep in OVERSTEPS[kind]:
        await shared_bus.use(overstep.unprotected(mode, generated(mode)))
        assert await overstep.succeeds(shared_bus), overstep
