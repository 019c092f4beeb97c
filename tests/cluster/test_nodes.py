"""A cluster of three nodes: servers and clients on different ones, nodes that die, freeze and restart under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from nodes import Cluster, Node
from stage import ServerProcess, Stage, becomes, do, run, settled

from envbus import NATSEnvClient
from envbus.client import suspects


def started(stage: Stage, items: Sequence[Any]) -> Counter[str]:
    """How often each of these was started."""
    ids = {item["example_id"] for item in items}
    return Counter(entry["example_id"] for entry in stage.events("start") if entry["example_id"] in ids)


async def all_started(stage: Stage, items: Sequence[Any], *clients: NATSEnvClient) -> None:
    """Wait until all jobs run, and their clients know where."""
    await becomes(lambda: len(started(stage, items)) == len(items), what="all jobs start")
    for client in clients:
        session = client._session
        assert session is not None
        await becomes(lambda session=session: not session._dispatch.pending(), what="all jobs are accepted")


async def results(calls: Sequence[asyncio.Task[Any]], items: Sequence[Any]) -> list[Any]:
    outputs = await asyncio.wait_for(asyncio.gather(*calls), 40)
    assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
    return outputs


def begin(client: NATSEnvClient, items: Sequence[Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(run(client, item)) for item in items]


async def suspected(client: NATSEnvClient) -> None:
    """Wait until the client has got a 503 for a server of its jobs."""
    session = client._session
    assert session is not None
    await becomes(lambda: bool(session._suspects.servers()), what="a 503")


async def pair_of(nodes: Cluster, stage: Stage) -> dict[int, Node]:
    """Two servers, each on a node of its own that is not the last; returns the nodes by the servers' pids."""
    placed = {launch_on(stage, node).pid: node for node in nodes.nodes[:2]}
    await stage.ready()
    return placed


def launch_on(stage: Stage, node: Node, **options: Any) -> ServerProcess:
    """A server on this node; it knows only that one and what it tells of, so that it surely starts there."""
    return stage.launch(address=node.url, **options)


async def test_all_kinds_of_calls_between_all_nodes(nodes: Cluster, stage: Stage) -> None:
    """Rollouts, groups, results and inputs of 5 MB, and a cancel, with each server and client on a node of its own."""
    servers = [launch_on(stage, node) for node in nodes.nodes]
    await stage.ready()
    for node in nodes.nodes:
        async with stage.client(address=node.url) as client:
            small = [do("slow", t=0.05) for _ in range(24)]
            large = [do("big", n=5_000_000) for _ in range(3)]
            heavy = [do("echo_size", prompt=[{"role": "user", "content": "x" * 5_000_000}])]
            group = client.run_group([do() for _ in range(3)], None, "m")
            outputs = await results(begin(client, small + large + heavy), small + large + heavy)
            assert {output["pid"] for output in outputs[:24]} == {server.pid for server in servers}
            assert [len(output["blob"]) for output in outputs[24:27]] == [5_000_000] * 3
            assert outputs[27]["size"] == 5_000_000
            assert [output["reward"] for output in await group] == [0.0, 1.0, 2.0]
            ended_early = do("slow", t=600)
            (call,) = begin(client, [ended_early])
            await stage.event("start", ended_early["example_id"])
            call.cancel()
            await stage.event("cancelled", ended_early["example_id"])
            await settled(client)
    await stage.idle()


async def test_a_node_that_dies_takes_no_rollout_with_it(nodes: Cluster, stage: Stage) -> None:
    """P24: servers and clients of the dead node go on at another one; running rollouts are not run again.

    One client knows all nodes, the other only the one that dies for good.
    """
    dying, *others = nodes.nodes
    launch_on(stage, dying, max_concurrent=16)
    launch_on(stage, others[0], max_concurrent=16)
    await stage.ready()
    async with stage.client() as knows_all, stage.client(address=dying.url) as knows_one:
        running = [do("slow", t=2.5) for _ in range(12)]
        calls = begin(knows_all, running[:6]) + begin(knows_one, running[6:])
        await all_started(stage, running, knows_all, knows_one)
        short = [do("slow", t=0.02) for _ in range(60)]
        short_calls = begin(knows_all, short[:30]) + begin(knows_one, short[30:])
        await stage.event("end", short[10]["example_id"])
        await dying.nats.kill()
        await results(calls + short_calls, running + short)
        later = [do() for _ in range(4)]
        await results(begin(knows_all, later[:2]) + begin(knows_one, later[2:]), later)
        await settled(knows_all)
        await settled(knows_one)
    assert set(started(stage, running).values()) == {1}
    await stage.idle()


async def test_a_server_whose_node_died_is_not_gone(nodes: Cluster, stage: Stage) -> None:
    """P12: a 503 from another node is no proof: the server is back elsewhere in a moment, and has its job."""
    placed = await pair_of(nodes, stage)
    item = do("slow", t=2)
    async with stage.client(address=nodes.nodes[2].url) as client:
        (call,) = begin(client, [item])
        holder = stage.server_of(await stage.event("start", item["example_id"]))
        with holder.frozen():
            await placed[holder.pid].nats.kill()
            await suspected(client)
        assert (await asyncio.wait_for(call, 20))["pid"] == holder.pid
        await settled(client)
    assert started(stage, [item])[item["example_id"]] == 1


async def test_a_server_that_was_taken_for_gone_stops_its_copy_when_it_is_back(
    nodes: Cluster, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: its node died and it came back too late: the job runs elsewhere by then."""
    monkeypatch.setattr(suspects, "RETURN_S", 0.3)
    placed = await pair_of(nodes, stage)
    item = do("slow_then", t=600, t_again=0.1)
    async with stage.client(address=nodes.nodes[2].url) as client:
        (call,) = begin(client, [item])
        holder = stage.server_of(await stage.event("start", item["example_id"]))
        with holder.frozen():
            await placed[holder.pid].nats.kill()
            assert (await asyncio.wait_for(call, 20))["pid"] == stage.other(holder).pid
        assert (await stage.event("cancelled", item["example_id"]))["pid"] == holder.pid
        await settled(client)
    await stage.idle()


async def test_a_killed_server_is_known_to_be_gone_on_other_nodes(
    nodes: Cluster, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P01: soon if a server beside it on its node still answers; a node that died would have taken both."""
    there, here, _ = nodes.nodes
    first, second = launch_on(stage, there), launch_on(stage, there)
    await stage.ready()
    items = [do("slow_then", t=2, t_again=0) for _ in range(8)]
    monkeypatch.setattr(suspects, "RETURN_S", 60.0)
    async with stage.client(address=here.url, settings={"stall_timeout_s": 600.0}) as client:
        calls = begin(client, items)
        await all_started(stage, items, client)
        first.kill()
        outputs = await results(calls, items)
        assert {output["pid"] for output in outputs} == {second.pid}
        await settled(client)


async def test_the_only_server_of_a_node_that_is_killed_is_gone_after_a_while(
    nodes: Cluster, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P01: nobody on that node vouches for it, so the time decides."""
    monkeypatch.setattr(suspects, "RETURN_S", 0.8)
    await pair_of(nodes, stage)
    item = do("slow_then", t=600, t_again=0)
    async with stage.client(address=nodes.nodes[2].url) as client:
        (call,) = begin(client, [item])
        lonely = stage.server_of(await stage.event("start", item["example_id"]))
        lonely.kill()
        assert (await asyncio.wait_for(call, 20))["pid"] == stage.other(lonely).pid
        await settled(client)


async def test_requests_that_are_lost_on_the_way_are_sent_again(nodes: Cluster, stage: Stage) -> None:
    """P14: a node that freezes swallows what is routed to it, without a 503; only the missing accepts tell.

    What it passes on when it thaws is accepted late, and cancelled.
    """
    freezing, here, third = nodes.nodes
    far = launch_on(stage, freezing, max_concurrent=8)
    near = launch_on(stage, third, max_concurrent=8)
    await stage.ready()
    items = [do("slow_then", t=0.1, t_again=600) for _ in range(12)]
    async with stage.client(address=here.url) as client:
        await run(client, do())
        freezing.nats._signal("STOP")
        try:
            outputs = await results(begin(client, items), items)
        finally:
            freezing.nats._signal("CONT")
        assert {output["pid"] for output in outputs} == {near.pid}
        await stage.ready()
        await stage.idle()
        await settled(client)
    late = [entry for entry in stage.events("start") if entry["pid"] == far.pid and entry["job"] is not None]
    late = [entry for entry in late if entry["example_id"] in {item["example_id"] for item in items}]
    assert late
    assert len(late) == len([entry for entry in stage.events("cancelled") if entry["pid"] == far.pid])


async def test_all_nodes_restart_one_after_the_other(nodes: Cluster, stage: Stage) -> None:
    """P24, P10: as for an upgrade of NATS, with rollouts that outlast it all and others that come and go."""
    for node in nodes.nodes[:2]:
        launch_on(stage, node, max_concurrent=16)
    await stage.ready()
    over = asyncio.Event()
    ended = 0

    async def busy(client: NATSEnvClient) -> None:
        nonlocal ended
        while not over.is_set():
            await asyncio.wait_for(run(client, do("slow", t=0.05)), 30)
            ended += 1

    async with stage.client() as client:
        steady = [asyncio.create_task(busy(client)) for _ in range(4)]
        running = [do("slow", t=4) for _ in range(8)]
        calls = begin(client, running)
        await all_started(stage, running, client)
        for node in nodes.nodes:
            await node.nats.restart()
            await nodes.meshed()
            enough = ended + 8
            await becomes(lambda enough=enough: ended >= enough, what="calls go on")
        over.set()
        await asyncio.gather(*steady)
        await results(calls, running)
        await settled(client)
    assert set(started(stage, running).values()) == {1}
    await stage.idle()
