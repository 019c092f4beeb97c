"""The EnvClient of verifiers 0.4, unmodified, through a gateway: episodes, deltas, cancel, health, lost servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from fleet import READY_S, Fleet, importable_envs
from gateway_process import gateway
from taskset_stock import SAMPLING, differences, stock_client, their_client
from verifiers.v1.serve.client import EnvClient

from envbus.demo_model import DemoModel

ENV = "probe-taskset"


@pytest.fixture(autouse=True)
def own_envs() -> Iterator[None]:
    with importable_envs():
        yield


@contextlib.asynccontextmanager
async def connected(fleet: Fleet) -> AsyncIterator[EnvClient]:
    """The library's client, connected to a gateway; it waits for the fleet as it does for its own server."""
    async with gateway(fleet, ENV) as (address,):
        client = EnvClient(address)
        try:
            await client.wait_for_server_startup(timeout=READY_S)
            yield client
        finally:
            await client.close()


async def task_data(fleet: Fleet, **changes: Any) -> dict[str, Any]:
    async with fleet.client(ENV) as client:
        await client.wait_for_server(timeout_s=READY_S)
        rows: list[Any] = list(await client.examples(1))
    return {**rows[0]["task_data"], **changes}


def open_gate(fleet: Fleet) -> None:
    Path(f"{fleet.ledger}.gate").touch()


async def run(client: EnvClient, demo: DemoModel, data: dict[str, Any], on_delta: Any = None) -> Any:
    return await client.run(their_client(demo.base_url), "m", vf.SamplingConfig(**SAMPLING), data, on_delta)


async def test_episodes_and_deltas_are_those_of_the_librarys_own_server(fleet: Fleet, demo: DemoModel) -> None:
    fleet.serve(ENV)
    data = await task_data(fleet)
    deltas: list[dict[str, Any]] = []
    async with connected(fleet) as client:
        ours = await run(client, demo, data, deltas.append)
    async with stock_client(ENV, {}) as stock:
        expected: list[dict[str, Any]] = []
        theirs = await run(stock, demo, data, expected.append)
    assert differences(ours, theirs) == []
    assert [sorted(each) for each in deltas if "nodes" in each] == [
        sorted(each) for each in expected if "nodes" in each
    ]


async def test_a_cancelled_run_ends_on_the_server(fleet: Fleet, demo: DemoModel) -> None:
    fleet.serve(ENV)
    data = await task_data(fleet, do="wait")
    async with connected(fleet) as client:
        call = asyncio.create_task(run(client, demo, data))
        await fleet.event("turn")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await fleet.event("cleanup")
        assert (await run(client, demo, {**data, "do": "run"})).traces[0].ok


async def test_deltas_come_while_the_episode_runs_and_a_lost_attempts_are_discarded(
    fleet: Fleet, demo: DemoModel
) -> None:
    first = fleet.serve(ENV)
    data = await task_data(fleet, do="wait")
    deltas: list[dict[str, Any]] = []
    has_nodes = asyncio.Event()

    def keep(delta: dict[str, Any]) -> None:
        deltas.append(delta)
        if "nodes" in delta:
            has_nodes.set()

    async with connected(fleet) as client:
        call = asyncio.create_task(run(client, demo, data, keep))
        await fleet.event("turn")
        async with asyncio.timeout(READY_S):
            await has_nodes.wait()
        fleet.serve(ENV)
        first.signal(signal.SIGKILL)
        await fleet.event("turn", count=2)
        open_gate(fleet)
        episode = await call
    assert len(episode.traces) == 1
    assert episode.traces[0].ok
    opened = [delta["trace"] for delta in deltas if "open" in delta]
    assert [delta["trace"] for delta in deltas if delta.get("discard")] == opened[:1]
    assert opened[1:] == [episode.traces[0].id]


async def test_errors(fleet: Fleet, demo: DemoModel) -> None:
    fleet.serve(ENV)
    data = await task_data(fleet)
    async with connected(fleet) as client:
        with pytest.raises(RuntimeError, match="task_data"):
            await run(client, demo, {**data, "turns": "many"})


async def test_health_waits_for_the_fleet(fleet: Fleet, demo: DemoModel) -> None:
    async with gateway(fleet, ENV) as (address,):
        client = EnvClient(address)
        try:
            assert not await client.health(timeout=0.5)
            fleet.serve(ENV)
            await client.wait_for_server_startup(timeout=READY_S)
            assert await client.health()
        finally:
            await client.close()
