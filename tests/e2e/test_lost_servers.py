"""Servers that die or freeze under their jobs: nobody waits for ever, one result is delivered."""

from __future__ import annotations

import asyncio
import time

import pytest
from stage import READY_S, Stage, becomes, do, leftovers, run, settled

from envbus.errors import NoServerError, ServerLostError


@pytest.fixture
async def pair(stage: Stage) -> Stage:
    """A stage with two servers of 4 slots."""
    stage.launch()
    stage.launch()
    await stage.ready()
    return stage


async def test_a_job_of_a_killed_server_finishes_on_another(pair: Stage) -> None:
    """P01: same job id, soon after the kill, whatever the rollout's length."""
    item = do("slow_then", t=60, t_again=0.1)
    async with pair.client() as client:
        call = asyncio.create_task(run(client, item))
        first = await pair.event("start", item["example_id"])
        before = time.monotonic()
        pair.server_of(first).kill()
        output = await call
        assert time.monotonic() - before < 30
        assert output["pid"] == pair.other(pair.server_of(first)).pid
        second = await pair.event("start", item["example_id"], count=2)
        assert first["job"] == second["job"]
        await settled(client)
    await pair.idle(pair.other(pair.server_of(first)))


async def test_with_no_server_left_the_call_ends_with_env_server_and_cause(stage: Stage) -> None:
    """P01: soon after no_server_timeout_s (1 s here) and never with the rollout's own length."""
    server = stage.launch()
    item = do("slow", t=60)
    async with stage.client(settings={"no_server_timeout_s": 1.0}) as client:
        info = await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(run(client, item))
        await stage.event("start", item["example_id"])
        before = time.monotonic()
        server.kill()
        with pytest.raises(ServerLostError, match=rf"server {info.server[:8]} is gone.*env 'stage'") as caught:
            await call
        assert time.monotonic() - before < 20
        assert caught.value.retryable
        await settled(client)
        before = time.monotonic()
        with pytest.raises(NoServerError, match="'stage'"):
            await run(client, do())
        assert time.monotonic() - before < 20


async def test_attempts_are_bounded(pair: Stage) -> None:
    """P01: a job that kills its servers does not go through the whole fleet."""
    item = do("slow", t=60)
    async with pair.client(settings={"max_attempts": 2}) as client:
        call = asyncio.create_task(run(client, item))
        for count in (1, 2):
            holder = pair.server_of(await pair.event("start", item["example_id"], count=count))
            await becomes(lambda: leftovers(client)["pending"] == 0, what="the client knows its server")
            holder.kill()
        with pytest.raises(ServerLostError, match="lost 2 servers"):
            await asyncio.wait_for(call, 20)
        await settled(client)


async def test_a_frozen_server_loses_its_job_and_its_copy_is_stopped_when_it_wakes(pair: Stage) -> None:
    """P12: one id for both attempts, one result, the revived copy is cancelled."""
    item = do("slow_then", t=60, t_again=0.2)
    async with pair.client(settings={"stall_timeout_s": 1.0}) as client:
        call = asyncio.create_task(run(client, item))
        first = await pair.event("start", item["example_id"])
        frozen = pair.server_of(first)
        with frozen.frozen():
            output = await asyncio.wait_for(call, 30)
            assert output["pid"] == pair.other(frozen).pid
        stopped = await pair.event("cancelled", item["example_id"])
        assert stopped["pid"] == frozen.pid
        assert stopped["job"] == first["job"]
        await settled(client)
    await pair.idle()
    assert len(pair.events("start", example_id=item["example_id"])) == 2
    assert len(pair.events("end", example_id=item["example_id"])) == 1


async def test_a_server_that_wakes_first_delivers_and_the_second_copy_is_stopped(pair: Stage) -> None:
    """P12: the first complete result wins, whichever attempt it is of."""
    item = do("slow_then", t=1.5, t_again=60)
    async with pair.client(settings={"stall_timeout_s": 0.5}) as client:
        call = asyncio.create_task(run(client, item))
        first = await pair.event("start", item["example_id"])
        frozen = pair.server_of(first)
        with frozen.frozen():
            await pair.event("start", item["example_id"], count=2)
        output = await asyncio.wait_for(call, 30)
        assert output["pid"] == frozen.pid
        stopped = await pair.event("cancelled", item["example_id"])
        assert stopped["pid"] == pair.other(frozen).pid
        await settled(client)
    await pair.idle()


async def test_a_frozen_member_of_the_queue_group_delays_nothing_for_long(pair: Stage) -> None:
    """P14: 40 of 40 succeed on the other server; what the frozen one got is not run by it later for nobody."""
    frozen = pair.servers[0]
    items = [do() for _ in range(40)]
    async with pair.client(settings={"stall_timeout_s": 1.0}) as client:
        with frozen.frozen():
            before = time.monotonic()
            outputs = await asyncio.gather(*(run(client, item) for item in items))
            assert time.monotonic() - before < 20
            assert {output["pid"] for output in outputs} == {pair.servers[1].pid}
        await pair.ready()
        await pair.idle()
        await settled(client)
    assert {entry["example_id"] for entry in pair.events("end")} == {item["example_id"] for item in items}


async def test_pushes_that_a_frozen_server_swallowed_do_not_run_there_for_nobody(pair: Stage) -> None:
    """P12, P14: their jobs are over elsewhere when it wakes; each late accept is answered with a cancel."""
    frozen = pair.servers[0]
    items = [do("slow_then", t=0.1, t_again=60) for _ in range(12)]
    async with pair.client() as client:
        with frozen.frozen():
            await asyncio.wait_for(asyncio.gather(*(run(client, item) for item in items)), 40)
        await pair.idle()
        await settled(client)

    def count(event: str) -> int:
        return sum(entry["pid"] == frozen.pid for entry in pair.events(event))

    await becomes(lambda: count("start") == count("cancelled"), what="what it started is cancelled")


async def test_a_frozen_server_that_is_killed_is_known_to_be_gone(pair: Stage) -> None:
    """P14: SIGKILL works on a stopped process; the 503 then replaces the wait for stall_timeout_s."""
    item = do("slow_then", t=60, t_again=0)
    async with pair.client(settings={"stall_timeout_s": 60.0}) as client:
        call = asyncio.create_task(run(client, item))
        holder = pair.server_of(await pair.event("start", item["example_id"]))
        with holder.frozen():
            holder.kill()
            await asyncio.wait_for(call, 30)
        await settled(client)


async def test_a_large_result_of_a_server_that_dies_is_made_again(pair: Stage) -> None:
    """P01, P05: killed while its result is being collected."""
    item = do("big", n=60_000_000)
    async with pair.client() as client:
        call = asyncio.create_task(run(client, item))
        first = await pair.event("end", item["example_id"])
        pair.server_of(first).kill()
        output = await asyncio.wait_for(call, 60)
        assert len(output["blob"]) == 60_000_000
        await settled(client)
