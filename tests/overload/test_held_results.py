"""A server whose memory for results or inputs is used up takes no more work, and loses nothing (CASES P33, P37)."""

from __future__ import annotations

import asyncio
from typing import Any

from raw_client import RawClient
from rich.console import Console
from stage import Stage, do, run

from envbus.bus.messages import Parts
from envbus.cli.fleet_tables import server_table
from envbus.controller.fleet_views import ServerView

MB = 1_000_000
CALM: dict[str, Any] = {"probe_after_s": 30, "orphan_grace_s": 60}
"""A client that says nothing keeps what it has."""


def big(size_bytes: int = MB) -> Any:
    return do("big", n=size_bytes)


async def fill(client: RawClient, *, at_most: int = 12) -> list[str]:
    """Have results of 1 MB held until no more work is taken from this client."""
    held: list[str] = []
    while (job := await client.take(big())) is not None:
        held.append(job)
        await client.ended(job)
        assert len(held) < at_most, "the budget holds nobody back"
    return held


async def test_results_that_wait_hold_back_their_client_then_all_and_none_is_lost(stage: Stage) -> None:
    """P33: the budget is back-pressure. One client gets half of it; the others work on."""
    server = stage.launch(max_concurrent=2, settings=CALM | {"hold_results_bytes": 4 * MB})
    await stage.ready()
    async with RawClient.connect(stage) as slow, RawClient.connect(stage) as slower, stage.client() as other:
        kept = {slow: await fill(slow)}
        assert len(kept[slow]) == 2
        for _ in range(3):
            assert (await run(other, do()))["reward"] == 1.0
        async with stage.beats() as beats:
            (beat,) = await beats.until(lambda now: bool(now))
            assert (beat.state, beat.short_of_memory) == ("ready", False)
            kept[slower] = await fill(slower)
            (beat,) = await beats.until(lambda now: all(beat.short_of_memory for beat in now))
            assert beat.state == "full"
            assert 4 * MB <= beat.held_bytes <= 4 * MB + 2 * MB + 10_000
            waiting = asyncio.create_task(run(other, do()))
            await beats.until(lambda now: all(beat.waiting_jobs for beat in now))
            assert not waiting.done()
            for client, jobs in kept.items():
                for job in jobs:
                    assert len((await client.output(job))["blob"]) == MB
                    await client.done(job)
            assert (await asyncio.wait_for(waiting, 20))["reward"] == 1.0
            (beat,) = await beats.until(lambda now: all(beat.held_results == 0 for beat in now))
            assert (beat.state, beat.short_of_memory, beat.lost_results, beat.unconfirmed_results) == (
                "ready",
                False,
                0,
                0,
            )
    assert "no more jobs are taken until memory is free" in server.log


async def test_a_budget_of_few_results_delivers_many_to_a_slow_reader(stage: Stage) -> None:
    """P33, P37: at most the budget and one result per slot is ever held."""
    stage.launch(max_concurrent=4, settings={"hold_results_bytes": 3 * MB})
    await stage.ready()
    most = 0
    async with stage.client(settings={"pull_window": 1}) as client, stage.beats() as beats:
        jobs = asyncio.gather(*(run(client, big()) for _ in range(24)))
        while not jobs.done():
            (beat,) = await beats.until(lambda now: bool(now))
            most = max(most, beat.held_bytes)
        assert [len(output["blob"]) for output in await jobs] == [MB] * 24
        (beat,) = await beats.until(lambda now: all(beat.held_results == 0 for beat in now))
        assert (beat.jobs, beat.lost_results, beat.unconfirmed_results) == (24, 0, 0)
    assert most <= 3 * MB + 4 * MB + 40_000


async def test_a_client_that_never_says_done_gets_all_its_results_and_blocks_nobody(stage: Stage) -> None:
    """P33: what was sent and is asked for no more is let go while memory is short."""
    stage.launch(max_concurrent=2, settings={"hold_results_bytes": MB, "orphan_grace_s": 0.6})
    await stage.ready()
    async with RawClient.connect(stage) as rude, stage.client() as other, stage.beats() as beats:
        for size_bytes in [100_000] * 8 + [400_000] * 2:
            async with asyncio.timeout(40):
                job = await rude.run(big(size_bytes))
            assert len((await rude.output(job))["blob"]) == size_bytes
        assert (await asyncio.wait_for(run(other, do()), 20))["reward"] == 1.0
        (beat,) = await beats.until(lambda now: bool(now))
        assert beat.jobs == 11
        assert beat.lost_results == 0
        assert 0 < beat.unconfirmed_results <= 10
        assert beat.held_bytes < MB


async def test_inputs_that_come_and_run_have_a_budget_too(stage: Stage) -> None:
    """P33: memory of all parts of all clients together, and half of it for each."""
    stage.launch(max_concurrent=4, settings=CALM | {"hold_inputs_bytes": 3 * MB})
    await stage.ready()
    parts = Parts(size=2 * MB, parts=4, part_bytes=MB // 2, checksum=0, raw_size=2 * MB)
    raw = RawClient.connect(stage)
    async with raw as stuck, RawClient.connect(stage) as second, stage.client() as other, stage.beats() as beats:
        first = await stuck.take(None, upload=parts)
        assert first is not None
        assert await stuck.take(None, upload=parts) is None
        assert (await asyncio.wait_for(run(other, do()), 20))["reward"] == 1.0
        while await second.take(None, upload=parts) is None:  # noqa: ASYNC110 - until its place is free again
            await asyncio.sleep(0.02)
        (beat,) = await beats.until(lambda now: all(beat.short_of_memory for beat in now))
        assert (beat.state, beat.in_flight) == ("full", 2)
        waiting = asyncio.create_task(run(other, do()))
        await beats.until(lambda now: all(beat.waiting_jobs for beat in now))
        assert not waiting.done()
        await stuck.cancel(first)
        assert (await asyncio.wait_for(waiting, 20))["reward"] == 1.0


async def test_a_stop_ends_the_jobs_whose_input_has_not_come(stage: Stage) -> None:
    """Their slots are free, and their client is told."""
    server = stage.launch(settings=CALM | {"grace_s": 0.2, "collect_grace_s": 20})
    await stage.ready()
    async with RawClient.connect(stage) as client, stage.beats() as beats:
        parts = Parts(size=MB, parts=2, part_bytes=MB // 2, checksum=0, raw_size=MB)
        job = await client.take(None, upload=parts)
        assert job is not None
        server.popen.terminate()
        assert (await client.ended(job)).code == "server_stopping"  # type: ignore[attr-defined]
        (beat,) = await beats.until(lambda now: all(beat.state == "stopping" for beat in now))
        assert beat.in_flight == 0
        await client.done(job)
        assert await server.exit_code() == 0


def test_a_server_that_is_short_of_memory_reads_so_in_ls() -> None:
    console = Console(width=160)
    short = ServerView(server="a" * 32, env="stage", state="full", slots=4, short_of_memory=True)
    full = ServerView(server="b" * 32, env="stage", state="full", slots=4)
    with console.capture() as shown:
        console.print(server_table([short, full]))
    assert [("full (memory)" in line, "full" in line) for line in shown.get().splitlines()[1:]] == [
        (True, True),
        (False, True),
    ]
