"""Stopping a server: finished work is delivered, the rest may be sent elsewhere, teardown runs once and whole."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import nats
import pytest
from stage import READY_S, ServerProcess, Stage, do, run, settled

from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Control, Ok, pack, parse_as
from envbus.bus.subjects import Subjects
from envbus.errors import CallError, NoServerError


async def assert_clean_end(stage: Stage, server: ServerProcess, *, timeout_s: float = 40) -> None:
    """The process ends with 0, its teardown hook ran once and to its end, and nothing blew up."""
    assert await server.exit_code(timeout_s) == 0
    assert [entry["event"] for entry in stage.events() if "tear" in entry["event"] or "torn" in entry["event"]] == [
        "teardown",
        "torn_down",
    ]
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_running_rollouts_are_finished_and_delivered(stage: Stage, number: signal.Signals) -> None:
    """P19, P20: no new jobs meanwhile, all replies delivered, large ones too, exit 0, teardown once."""
    server = stage.launch(env_args={"teardown_s": 0.2})
    items = [do("slow", t=1), do("slow", t=1), do("big", n=3_000_000)]
    async with stage.client(settings={"no_server_timeout_s": 0.5}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        slow = [asyncio.create_task(run(client, item)) for item in items[:2]]
        for item in items[:2]:
            await stage.event("start", item["example_id"])
        async with stage.beats() as beats:
            large = asyncio.create_task(run(client, items[2]))
            await stage.event("start", items[2]["example_id"])
            server.signal(number)
            await beats.until(lambda now: now[0].state == "draining")
        late = do()
        refused = asyncio.create_task(run(client, late))
        outputs = await asyncio.gather(*slow, large)
        assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
        await assert_clean_end(stage, server)
        with pytest.raises(NoServerError):
            await refused
        await settled(client)
    assert stage.events("start", example_id=late["example_id"]) == []


async def test_over_the_grace_jobs_are_cancelled_and_run_on_another_server(stage: Stage) -> None:
    """P19: the reply says that the server stops, which is safe to retry, and the client does."""
    stage.launch(settings={"grace_s": 0.3})
    stage.launch(settings={"grace_s": 0.3})
    await stage.ready()
    item = do("slow_then", t=60, t_again=0)
    async with stage.client() as client:
        call = asyncio.create_task(run(client, item))
        server = stage.server_of(await stage.event("start", item["example_id"]))
        server.signal(signal.SIGTERM)
        output = await asyncio.wait_for(call, 40)
        assert output["pid"] == stage.other(server).pid
        await stage.event("cancelled", item["example_id"])
        await assert_clean_end(stage, server)
        await settled(client)


async def test_over_the_grace_with_no_other_server_the_error_is_retryable(stage: Stage) -> None:
    """P19: it tells of the stop, and that nobody else is there."""
    server = stage.launch(settings={"grace_s": 0.3})
    item = do("slow", t=60)
    async with stage.client(settings={"no_server_timeout_s": 0.5}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(run(client, item))
        await stage.event("start", item["example_id"])
        server.signal(signal.SIGTERM)
        with pytest.raises(CallError, match=r"server stopped before the job was done.*'stage'") as caught:
            await asyncio.wait_for(call, 40)
        assert caught.value.retryable
        await assert_clean_end(stage, server)


async def test_a_second_signal_cuts_the_grace_but_not_the_teardown(stage: Stage) -> None:
    """P20: nor does a third one that comes during the teardown."""
    server = stage.launch(settings={"grace_s": 60}, env_args={"teardown_s": 0.5})
    item = do("slow", t=60, cleanup_s=0.2)
    async with stage.client(settings={"no_server_timeout_s": 0.3}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(run(client, item))
        await stage.event("start", item["example_id"])
        async with stage.beats() as beats:
            server.signal(signal.SIGTERM)
            await beats.until(lambda now: now[0].state == "draining")
        server.signal(signal.SIGTERM)
        await stage.event("cancelled", item["example_id"])
        await stage.event("teardown")
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGINT)
        await assert_clean_end(stage, server)
        with pytest.raises(CallError):
            await call


async def test_a_rollout_that_ignores_its_cancel_does_not_hold_up_the_stop_for_ever(stage: Stage) -> None:
    """P20: everything is bounded; the teardown hook runs nevertheless."""
    server = stage.launch(settings={"grace_s": 0.2, "teardown_timeout_s": 1.0})
    item = do("stubborn", t=60)
    async with stage.client(settings={"no_server_timeout_s": 0.3}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(run(client, item))
        await stage.event("start", item["example_id"])
        server.signal(signal.SIGTERM)
        with pytest.raises(CallError):
            await asyncio.wait_for(call, 40)
        await stage.event("torn_down")
        assert await server.exit_code() == 0


async def test_a_teardown_hook_that_hangs_is_bounded(stage: Stage) -> None:
    """P20: by teardown_timeout_s, with a line in the log."""
    server = stage.launch(settings={"teardown_timeout_s": 0.3}, env_args={"teardown_s": 60})
    await stage.ready()
    server.signal(signal.SIGTERM)
    assert await server.exit_code() == 0
    assert "teardown of env stage took over 0.3 s" in server.log


async def test_sigterm_while_loading_ends_the_process_at_once(stage: Stage) -> None:
    """P20, P59: and clients see that it was loading."""
    server = stage.launch(env_args={"load_s": 30})
    await stage.event("loading", timeout_s=READY_S)
    async with stage.beats() as beats:
        await beats.until(lambda now: now[0].state == "loading")
    server.signal(signal.SIGTERM)
    assert await server.exit_code(20) == 0
    assert "Traceback" not in server.log
    assert "stopped while the environment was loading" in server.log


async def test_sigterm_while_nats_is_away(own_nats: EmbeddedNats, tmp_path: Path) -> None:
    """P19: exit within the limits, without a traceback, teardown included; a running rollout ends first."""
    stage = Stage(own_nats.url, tmp_path)
    try:
        server = stage.launch(settings={"collect_grace_s": 0.5})
        item = do("slow", t=0.8)
        async with stage.client() as client:
            await client.wait_for_server(timeout_s=READY_S)
            call = asyncio.create_task(run(client, item))
            await stage.event("start", item["example_id"])
            await own_nats.kill()
            server.signal(signal.SIGTERM)
            await assert_clean_end(stage, server)
            assert stage.events("end", example_id=item["example_id"])
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    finally:
        stage.close()


async def test_an_operator_drains_a_server_over_nats(stage: Stage) -> None:
    """P20: as SIGTERM would, with one reply to the order."""
    server = stage.launch()
    item = do("slow", t=0.5)
    async with stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(run(client, item))
        await stage.event("start", item["example_id"])
        connection = await nats.connect(stage.url)
        order = Subjects("stage", stage.prefix).ctl_all
        reply = await connection.request(order, pack(Control(action="drain")), timeout=10)
        assert parse_as(reply.data, Ok).state == "draining"
        await connection.close()
        assert (await call)["reward"] == 1.0
        await assert_clean_end(stage, server)


async def test_a_server_ends_when_its_parent_is_gone(stage: Stage) -> None:
    """P20: the lifeline's end is a stop at once, teardown included."""
    server = stage.launch(settings={"grace_s": 60, "collect_grace_s": 0.2})
    item = do("slow", t=60)
    async with stage.client(settings={"no_server_timeout_s": 0.3}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(run(client, item))
        await stage.event("start", item["example_id"])
        server._lifeline.close()
        await assert_clean_end(stage, server)
        with pytest.raises(CallError):
            await call
