"""Which server gets a job, how many run at once, and who is served first."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from stage import READY_S, Stage, do, run, settled

from envbus.errors import FingerprintError, NoServerError


async def timed(client: Any, item: Any) -> float:
    before = time.monotonic()
    await run(client, item)
    return time.monotonic() - before


def most_at_once(stage: Stage, ids: set[Any]) -> dict[int, int]:
    """Return the peak of running rollouts per process, over all that ran: the ledger counts at each start."""
    peaks: Counter[int] = Counter()
    for entry in stage.events("start"):
        if entry["example_id"] in ids:
            peaks[entry["pid"]] = max(peaks[entry["pid"]], entry["running"])
    return dict(peaks)


async def test_short_jobs_go_past_a_busy_server(stage: Stage) -> None:
    """P15: A is inside one long rollout; 40 jobs of 10 ms all run on B, none waits for A."""
    stage.launch(max_concurrent=1)
    stage.launch(max_concurrent=1)
    await stage.ready()
    long = do("slow", t=600)
    slow = {"accept_timeout_s": 30.0, "wait_repeat_s": 30.0}  # what a job that waited for A would take
    async with stage.client(settings=slow) as client:
        held = asyncio.create_task(run(client, long))
        busy = stage.server_of(await stage.event("start", long["example_id"]))
        before = time.monotonic()
        outputs = await asyncio.gather(*(run(client, do("slow", t=0.01)) for _ in range(40)))
        assert time.monotonic() - before < 20
        assert {output["pid"] for output in outputs} == {stage.other(busy).pid}
        waits = sorted([await timed(client, do("slow", t=0.01)) for _ in range(40)])
        assert waits[37] < 5
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await settled(client)
    await stage.idle()


async def test_a_full_server_is_waited_for_without_bound(stage: Stage) -> None:
    """P59: full is no error, though it lasts longer than no_server_timeout_s; its beat says so."""
    stage.launch(max_concurrent=1)
    async with stage.client(settings={"no_server_timeout_s": 0.3, "loading_timeout_s": 0.3}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        first = do("slow", t=1.5)
        held = asyncio.create_task(run(client, first))
        await stage.event("start", first["example_id"])
        waiting = asyncio.create_task(run(client, do()))
        async with stage.beats() as beats:
            await beats.until(lambda now: now[0].state == "full" and now[0].waiting_jobs == 1)
        await asyncio.gather(held, waiting)


@pytest.mark.parametrize("form", ["singles", "groups", "mixed"])
async def test_never_more_than_max_concurrent_run_in_a_server(stage: Stage, form: str) -> None:
    """P52: as single calls and as groups. A group may start on one free slot: only mixed can run over, by a group."""
    stage.launch(max_concurrent=4)
    stage.launch(max_concurrent=4)
    await stage.ready()
    singles = [do("slow", t=0.1) for _ in range(16)]
    groups = [[do("slow", t=0.1) for _ in range(4)] for _ in range(4)]
    async with stage.client() as client:
        calls: list[Any] = []
        if form != "groups":
            calls += [run(client, item) for item in singles]
        if form != "singles":
            calls += [client.run_group(group, None, "m") for group in groups]
        await asyncio.gather(*calls)
        await settled(client)
    ids = {item["example_id"] for item in [*singles, *(item for group in groups for item in group)]}
    peaks = most_at_once(stage, ids)
    assert max(peaks.values()) <= (4 if form != "mixed" else 7)
    await stage.idle()


async def test_the_limit_of_an_evaluation_holds_over_all_servers(stage: Stage) -> None:
    """P52: max_concurrent of evaluate() is the client's, whatever the fleet could take."""
    stage.launch(max_concurrent=8)
    stage.launch(max_concurrent=8)
    await stage.ready()
    async with stage.client() as client:
        result = await client.evaluate(None, "m", rollouts_per_example=2, max_concurrent=4)
    assert len(result["outputs"]) == 32
    running = peak = 0
    for entry in sorted(stage.events(), key=lambda entry: entry.get("at", 0)):
        running += {"start": 1, "end": -1}.get(entry["event"], 0)
        peak = max(peak, running)
    assert 2 <= peak <= 4


async def test_a_second_client_does_not_wait_behind_the_firsts_backlog(stage: Stage) -> None:
    """A waiting line that is fair per client, not per job."""
    stage.launch(max_concurrent=4)
    async with stage.client() as big, stage.client() as small:
        await big.wait_for_server(timeout_s=READY_S)
        await small.connect()
        backlog = [asyncio.create_task(run(big, do("slow", t=0.05))) for _ in range(200)]
        await stage.event("end", count=8)
        await asyncio.gather(*(run(small, do("slow", t=0.05)) for _ in range(8)))
        assert sum(call.done() for call in backlog) < 150
        await asyncio.gather(*backlog)


@pytest.mark.parametrize(("max_priority", "before"), [(100, {5}), (0, {2, 3})])
async def test_higher_priority_goes_first_as_far_as_the_server_lets_it(
    stage: Stage, max_priority: int, before: set[int]
) -> None:
    """With 0 the two take turns."""
    stage.launch(max_concurrent=1, settings={"max_priority": max_priority})
    async with stage.client() as low, stage.client(priority=5) as high:
        await low.wait_for_server(timeout_s=READY_S)
        await high.connect()
        first = do("slow", t=60)
        holds = asyncio.create_task(run(low, first))
        await stage.event("start", first["example_id"])
        lows = [do("slow", t=0.02) for _ in range(5)]
        highs = [do("slow", t=0.02) for _ in range(5)]
        calls = [asyncio.create_task(run(low, item)) for item in lows]
        async with stage.beats() as beats:
            await beats.until(lambda now: now[0].waiting_jobs == 5)
            calls += [asyncio.create_task(run(high, item)) for item in highs]
            await beats.until(lambda now: now[0].waiting_jobs == 10)
        holds.cancel()
        await asyncio.gather(*calls)
    order = [entry["example_id"] for entry in stage.events("start")][1:]
    assert len(set(order[:5]) & {item["example_id"] for item in highs}) in before


async def test_a_server_that_joins_gets_work_that_waits(stage: Stage) -> None:
    """Scaling out is starting one more subscriber."""
    stage.launch(max_concurrent=1)
    async with stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        joined = stage.launch(max_concurrent=4)
        served_by: Counter[int] = Counter()

        async def ask_until_the_new_one_works() -> None:
            while served_by[joined.pid] < 10:
                served_by[(await run(client, do("slow", t=0.05)))["pid"]] += 1

        async with asyncio.timeout(READY_S):
            await asyncio.gather(*(ask_until_the_new_one_works() for _ in range(20)))


async def test_jobs_of_different_arguments_never_share_a_queue(stage: Stage) -> None:
    """P35: the env's name on the bus carries a digest of its arguments, the same on both sides."""
    stage.name = None
    level_1 = {"ledger": str(stage.ledger_file), "tag": "level 1"}
    level_5 = {"tag": "level 5", "ledger": str(stage.ledger_file)}
    stage.launch(env_args=level_1)
    stage.launch(env_args=level_5)
    await stage.ready()
    async with stage.client(env_args=level_1) as one, stage.client(env_args=level_5) as five:
        assert one.env.startswith("stage-env~")
        outputs = await asyncio.gather(*(run(client, do()) for _ in range(10) for client in (one, five)))
        assert [output["tag"] for output in outputs] == ["level 1", "level 5"] * 10
        assert (await five.info()).env_args["tag"] == "level 5"
    async with stage.client(settings={"no_server_timeout_s": 0.2}) as nobody:
        with pytest.raises(NoServerError, match=r"the envs there are: stage-env~\w{8}, stage-env~\w{8}"):
            await run(nobody, do())


async def test_a_client_that_pins_a_fingerprint_reaches_only_its_servers(stage: Stage) -> None:
    """P35: two configurations under one given name: the fleet is mixed, and a client may pin one of them."""
    stage.launch(env_args={"tag": "old"})
    stage.launch(env_args={"tag": "new"})
    await stage.ready()
    async with stage.client() as asking:
        servers = {beat.pid: beat.fingerprint for beat in await asking.servers()}
    pinned = servers[stage.servers[1].pid]
    assert pinned != servers[stage.servers[0].pid]
    async with stage.client(fingerprint=pinned) as client:
        outputs = await asyncio.gather(*(run(client, do("slow", t=0.01)) for _ in range(20)))
        assert {output["tag"] for output in outputs} == {"new"}  # type: ignore[typeddict-item]
        await settled(client)
    async with stage.client(fingerprint="0" * 16, settings={"no_server_timeout_s": 0.5}) as client:
        with pytest.raises(FingerprintError, match=f"fingerprint {'0' * 16}.*{pinned}"):
            await asyncio.wait_for(run(client, do()), 5)
    await stage.idle()
