"""Two controllers on two hosts, network namespaces here; one is cut off from the bus for a while and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from controller_stage import Fleet, client_of, env_table, operator, pids, rollouts, steady_rollouts, wait_until
from two_hosts import two_hosts

from envbus.client import NATSEnvClient

CUT_S = 20.0
DOUBT = {"suspect_after_s": 5, "stuck_after_s": 18}
"""Shorter than the cut, longer than NATS clients take to notice one."""


@pytest.mark.timeout(180)
async def test_a_host_that_is_cut_off_starts_nothing_twice_and_loses_no_rollout(
    make_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    """P10, P24: it is nobody's death. All servers stay, and the rollouts that ran there end with their results."""
    notes = tmp_path / "notes.txt"
    notes.touch()
    with two_hosts() as hosts:
        one, two = (make_fleet(name, hosts.address) for name in ("one", "two"))
        for fleet in (one, two):
            fleet.write(env_table("a", replicas=2, max_concurrent=8, liveness=DOUBT, args={"notes": str(notes)}))
        ups = [fleet.up(inside=hosts.inside(fleet.controller_id)) for fleet in (one, two)]
        async with operator(one) as op_one, operator(two) as op_two, client_of(one, "a") as a:
            first, second = await op_one.until_running(2), await op_two.until_running(2)
            everybody = pids(first) | pids(second)
            enough = asyncio.Event()
            load = asyncio.ensure_future(steady_rollouts(a, enough, at_once=8, sleep_s=0.5))
            across = asyncio.ensure_future(rollouts(a, 8, sleep_s=CUT_S / 2))
            await wait_until(lambda: all(f"start {number}\n" in notes.read_text() for number in range(8)))
            await wait_until(lambda: all(f"{pid} start" in notes.read_text() for pid in everybody))
            with hosts.second_unplugged():
                silent = asyncio.ensure_future(op_two.status())
                await asyncio.sleep(CUT_S)
                with pytest.raises(TimeoutError):
                    await silent
                assert pids(await op_one.until_running(2)) == pids(first), "the other one takes nothing over"
            assert pids(await op_two.until_running(2)) == pids(second), "all are back"
            await asyncio.wait_for(across, 60)
            await until_served(a, pids(second))
            enough.set()
            assert await asyncio.wait_for(load, 60) <= everybody
            assert {p.pid for fleet in (one, two) for p in fleet.processes() if "serve" in p.cmdline()} == everybody
            assert len(list(one.folder.glob("logs/*/*/*.log"))) == 4, "four servers were ever launched"
            for up in ups:
                up.terminate()
            assert [await asyncio.to_thread(up.wait, 60) for up in ups] == [0, 0]


async def until_served(client: NATSEnvClient, wanted: set[int | None]) -> None:
    """Run rollouts until each of these servers had one of them."""
    async with asyncio.timeout(60):
        while wanted:
            wanted = wanted - set(await rollouts(client, 8, sleep_s=0.2))
