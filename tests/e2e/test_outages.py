"""NATS itself goes away and comes back: no rollout is lost, none runs twice, none runs for nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import READY_S, Stage, becomes, do, run, settled

from envbus.bus.embedded import EmbeddedNats
from envbus.errors import BusClosedError, CallTimeoutError


@pytest.fixture
def own_stage(own_nats: EmbeddedNats, tmp_path: Path) -> Iterator[Stage]:
    """A stage on a nats-server that the test may kill."""
    own = Stage(own_nats.url, tmp_path)
    yield own
    own.close()


async def test_a_restart_of_nats_loses_no_rollout(own_stage: Stage, own_nats: EmbeddedNats) -> None:
    """P24, P10: calls that end during and after the outage, small and large; each ran once; new ones work."""
    server = own_stage.launch(max_concurrent=8)
    items = [do("slow", t=0.5), do("slow", t=3), do("big", n=3_000_000, t=0)]
    async with own_stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        calls = [asyncio.create_task(run(client, item)) for item in items]
        for item in items:
            await own_stage.event("start", item["example_id"])
        await own_nats.kill()
        await own_stage.event("end", items[0]["example_id"])
        await own_nats.restart()
        outputs = await asyncio.wait_for(asyncio.gather(*calls), 12)
        assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
        assert (await asyncio.wait_for(run(client, do()), 5))["pid"] == server.pid
        await settled(client)
    for item in items:
        assert len(own_stage.events("start", example_id=item["example_id"])) == 1
    await own_stage.idle()


async def test_calls_made_during_an_outage_run_once_after_it(own_stage: Stage, own_nats: EmbeddedNats) -> None:
    """P10, P24: without a limit of their own they wait for NATS; the outage is longer than every timeout here."""
    server = own_stage.launch()
    items = [do() for _ in range(6)]
    async with own_stage.client(settings={"no_server_timeout_s": 10.0, "stall_timeout_s": 1.0}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        held = do("slow", t=2)
        pending = asyncio.create_task(run(client, held))
        await own_stage.event("start", held["example_id"])
        await own_nats.kill()
        calls = [asyncio.create_task(run(client, item)) for item in items]
        done, _ = await asyncio.wait(calls, timeout=2.5)
        assert not done
        await own_nats.restart()
        outputs = await asyncio.wait_for(asyncio.gather(pending, *calls), 60)
        assert {output["pid"] for output in outputs} == {server.pid}
        await settled(client)
    for item in [held, *items]:
        assert len(own_stage.events("start", example_id=item["example_id"])) == 1


async def test_a_server_that_is_back_later_than_its_client_keeps_its_job(
    own_stage: Stage, own_nats: EmbeddedNats
) -> None:
    """P24: soon after an outage a 503 is no proof of death: the job does not run a second time elsewhere."""
    own_stage.launch()
    own_stage.launch()
    await own_stage.ready()
    item = do("slow", t=1)
    async with own_stage.client(settings={"stall_timeout_s": 60.0}) as client:
        call = asyncio.create_task(run(client, item))
        holder = own_stage.server_of(await own_stage.event("start", item["example_id"]))
        await own_nats.kill()
        with holder.frozen():
            await own_nats.restart()
            other = own_stage.other(holder)
            await own_stage.ready(other)
            await asyncio.wait_for(run(client, do()), 40)
            checks = asyncio.get_running_loop().time() + 0.6
            while asyncio.get_running_loop().time() < checks:
                await run(client, do())
        assert (await asyncio.wait_for(call, 40))["pid"] == holder.pid
        await settled(client)
    assert len(own_stage.events("start", example_id=item["example_id"])) == 1


async def test_calls_that_failed_during_an_outage_never_run(own_stage: Stage, own_nats: EmbeddedNats) -> None:
    """P23: no ghost rollouts after the reconnect."""
    own_stage.launch()
    ghosts = [do("slow", t=0.1) for _ in range(3)]
    async with own_stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        async with own_stage.client(timeout_s=1.0) as hasty:
            await hasty.connect()
            await own_nats.kill()
            outcomes = await asyncio.gather(*(run(hasty, item) for item in ghosts), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [CallTimeoutError] * 3
            await own_nats.restart()
            await asyncio.wait_for(run(client, do()), 40)
            await becomes(lambda: hasty.is_connected, timeout_s=40)
            assert (await asyncio.wait_for(run(hasty, do()), 40))["reward"] == 1.0
        await settled(client)
    ids = {entry["example_id"] for entry in own_stage.events("start")}
    assert not ids & {item["example_id"] for item in ghosts}


async def test_close_during_an_outage_ends_pending_calls_at_once(own_stage: Stage, own_nats: EmbeddedNats) -> None:
    """P11."""
    own_stage.launch()
    client = own_stage.client()
    await client.wait_for_server(timeout_s=READY_S)
    item = do("slow", t=60)
    running = asyncio.create_task(run(client, item))
    await own_stage.event("start", item["example_id"])
    await own_nats.kill()
    unsent = asyncio.create_task(run(client, do()))
    asked = asyncio.create_task(client.info())
    await asyncio.wait({unsent, asked}, timeout=0.2)
    before = time.monotonic()
    await client.close()
    assert time.monotonic() - before < 10
    for call in (running, unsent):
        with pytest.raises(BusClosedError, match="unknown"):
            await call
    with pytest.raises((BusClosedError, TimeoutError)):
        await asyncio.wait_for(asked, 10)


async def test_a_server_that_was_there_first_works_once_nats_is_up(own_nats: EmbeddedNats, tmp_path: Path) -> None:
    """P58: it says in its log whom it waits for."""
    early = Stage(own_nats.url, tmp_path)
    await own_nats.kill()
    try:
        server = early.launch()
        async with asyncio.timeout(READY_S):
            while "trying again" not in server.log and "refused" not in server.log:
                assert server.popen.poll() is None
                await asyncio.sleep(0.05)
        await own_nats.restart()
        async with early.client() as client:
            await client.wait_for_server(timeout_s=READY_S)
            assert (await run(client, do()))["pid"] == server.pid
    finally:
        early.close()
