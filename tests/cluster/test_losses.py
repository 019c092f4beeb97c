"""Many jobs in flight when one of several servers is killed, and when NATS is away until all of them are over."""

from __future__ import annotations

from pathlib import Path

from stage import Stage, do, settled
from test_nodes import all_started, begin, results, started

from envbus.bus.embedded import EmbeddedNats

JOBS = 200


async def test_a_killed_server_costs_its_own_jobs_and_no_others(nats_url: str, tmp_path: Path) -> None:
    """P01: kill -9 of 1 of 4 servers with 200 jobs in flight; exactly those that it ran are run again."""
    stage = Stage(nats_url, tmp_path)
    try:
        servers = [stage.launch(max_concurrent=JOBS) for _ in range(4)]
        await stage.ready()
        items = [do("slow_then", t=3, t_again=0) for _ in range(JOBS)]
        async with stage.client() as client:
            calls = begin(client, items)
            await all_started(stage, items, client)
            lost = {entry["example_id"] for entry in stage.events("start") if entry["pid"] == servers[0].pid}
            assert lost
            servers[0].kill()
            outputs = await results(calls, items)
            await settled(client)
        assert servers[0].pid not in {output["pid"] for output in outputs}
        assert {example for example, count in started(stage, items).items() if count > 1} == lost
        assert started(stage, items).total() == JOBS + len(lost)
    finally:
        stage.close()


async def test_nats_away_while_all_rollouts_end_costs_none(own_nats: EmbeddedNats, tmp_path: Path) -> None:
    """P24, P10: 100 results of 1 MB wait on the servers; each is delivered once, no rollout is run again."""
    stage = Stage(own_nats.url, tmp_path)
    try:
        for _ in range(2):
            stage.launch(max_concurrent=50)
        await stage.ready()
        items = [do("big", n=1_000_000, t=1.5 + 0.02 * number) for number in range(100)]
        async with stage.client() as client:
            calls = begin(client, items)
            await all_started(stage, items, client)
            await own_nats.kill()
            await stage.event("end", count=len(items))
            await own_nats.restart()
            outputs = await results(calls, items)
            assert [len(output["blob"]) for output in outputs] == [1_000_000] * len(items)
            await settled(client)
        assert set(started(stage, items).values()) == {1}
        await stage.idle()
    finally:
        stage.close()
