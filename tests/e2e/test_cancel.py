"""Cancelling: the task on the server ends with its cleanup, whatever the moment and the way."""

from __future__ import annotations

import asyncio
import time

import pytest
from stage import READY_S, Stage, do, run, settled

from envbus.errors import BusClosedError, CallTimeoutError


async def started(shared: Stage, client: object, **fields: object) -> tuple[asyncio.Task[object], str]:
    item = do("slow", t=30, **fields)
    call = asyncio.create_task(run(client, item))  # type: ignore[arg-type]
    await shared.event("start", item["example_id"])
    return call, item["example_id"]


async def test_cancelling_the_awaiting_task_cancels_the_rollout(shared: Stage) -> None:
    """P06: within a second, cleanup included; the slot is free again; a second cancel is harmless."""
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        call, example_id = await started(shared, client, cleanup_s=0.1)
        call.cancel()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await shared.event("cancelled", example_id)
        await settled(client)
        call.cancel()
    await shared.idle()
    assert shared.events("end", example_id=example_id) == []


async def test_wait_for_cancels_the_rollout(shared: Stage) -> None:
    """P06."""
    item = do("slow", t=30)
    async with shared.client() as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run(client, item), 0.3)
        await shared.event("cancelled", item["example_id"])


async def test_a_call_limit_ends_only_its_call_and_cancels_it_on_the_server(shared: Stage) -> None:
    """P22: CallTimeoutError names env and limit; the client goes on."""
    item = do("slow", t=30)
    async with shared.client(timeout_s=0.3) as client:
        before = time.monotonic()
        with pytest.raises(CallTimeoutError, match=r"'stage'.*0\.3 s"):
            await run(client, item)
        assert 0.3 <= time.monotonic() - before < 10
        await shared.event("cancelled", item["example_id"])
        assert (await run(client, do()))["reward"] == 1.0
        await settled(client)


async def test_a_cancel_just_before_close_reaches_the_server(shared: Stage) -> None:
    """P06."""
    client = shared.client()
    await client.connect()
    call, example_id = await started(shared, client)
    call.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await call
    await shared.event("cancelled", example_id)
    await shared.idle()


async def test_close_ends_pending_calls_and_cancels_them_on_the_server(shared: Stage) -> None:
    """P11, P06: at once, with an error that says the outcome is unknown; close twice is fine."""
    client = shared.client()
    await client.connect()
    call, example_id = await started(shared, client)
    before = time.monotonic()
    await client.close()
    await client.close()
    assert time.monotonic() - before < 10
    with pytest.raises(BusClosedError, match="unknown"):
        await call
    await shared.event("cancelled", example_id)


async def test_a_cancel_at_any_moment_leaves_nothing_running(shared: Stage) -> None:
    """P06: before the job is sent, while it is on its way, before the server's accept is back."""
    items = [do("slow", t=30) for _ in range(120)]
    async with shared.client() as client:
        for number, item in enumerate(items):
            call = asyncio.create_task(run(client, item))
            await asyncio.sleep(number * 20e-6)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await settled(client)
        await shared.idle()
    ids = {item["example_id"] for item in items}
    starts = [entry for entry in shared.events("start") if entry["example_id"] in ids]
    cancels = [entry for entry in shared.events("cancelled") if entry["example_id"] in ids]
    assert len(starts) == len(cancels)


async def test_close_right_after_a_call_was_made_leaves_nothing_running(shared: Stage) -> None:
    """P06: the accept may still be under way when the client closes, and the connection stays for another client."""
    async with shared.client() as stays:
        for number in range(20):
            client = shared.client()
            await client.connect()
            call = asyncio.create_task(run(client, do("slow", t=30)))
            await asyncio.sleep(number * 50e-6)
            await client.close()
            with pytest.raises((BusClosedError, asyncio.CancelledError)):
                await call
        await shared.idle()
        assert (await run(stays, do()))["reward"] == 1.0


async def test_cancelling_a_job_that_waits_for_a_slot_never_runs_it(shared: Stage) -> None:
    """P06: it is in no server's hands yet; the waiting line forgets it."""
    async with shared.client() as client:
        holders = [await started(shared, client) for _ in range(4)]
        item = do("slow", t=30)
        waiting = asyncio.create_task(run(client, item))
        async with shared.beats() as beats:
            await beats.until(lambda now: any(beat.waiting_jobs == 1 for beat in now))
            waiting.cancel()
            await beats.until(lambda now: all(beat.waiting_jobs == 0 for beat in now))
        for call, _ in holders:
            call.cancel()
        await asyncio.gather(waiting, *(call for call, _ in holders), return_exceptions=True)
        await settled(client)
        assert (await run(client, do()))["reward"] == 1.0
    assert shared.events("start", example_id=item["example_id"]) == []
    await shared.idle()


async def test_a_cancelled_group_is_cancelled_whole(shared: Stage) -> None:
    """P06, P31."""
    items = [do("slow", t=30) for _ in range(3)]
    async with shared.client() as client:
        call = asyncio.create_task(client.run_group(items, None, "m"))
        for item in items:
            await shared.event("start", item["example_id"])
        call.cancel()
        for item in items:
            await shared.event("cancelled", item["example_id"])
        with pytest.raises(asyncio.CancelledError):
            await call
    await shared.idle()
