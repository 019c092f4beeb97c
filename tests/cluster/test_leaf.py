"""A leaf node of the cluster, with clients on one side of the link and servers on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nodes import Cluster, Link, Node, leaf, linked
from stage import Stage, becomes, do, run, settled
from test_nodes import all_started, begin, launch_on, results, started, suspected

from envbus.client import cancels, suspects
from envbus.errors import NoServerError


@pytest.fixture
async def leaf_node(nodes: Cluster, tmp_path: Path) -> AsyncIterator[tuple[Node, Link]]:
    async with leaf(nodes, tmp_path) as linked_leaf:
        yield linked_leaf


async def test_all_kinds_of_calls_through_a_leaf_node(
    nodes: Cluster, stage: Stage, leaf_node: tuple[Node, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P01, P59: rollouts, a group, 5 MB both ways, a cancel; nobody there is told at once; a kill is noticed."""
    node, _ = leaf_node
    servers = [launch_on(stage, nodes.nodes[1]) for _ in range(2)]
    await stage.ready()
    async with stage.client(address=node.url, settings={"no_server_timeout_s": 0.3}, name="nobody") as lost:
        with pytest.raises(NoServerError, match="no server of env 'nobody'"):
            await asyncio.wait_for(run(lost, do()), 10)
    async with stage.client(address=node.url, settings={"stall_timeout_s": 600.0}) as client:
        items = [do("slow", t=0.05) for _ in range(24)]
        items += [do("big", n=5_000_000), do("echo_size", prompt=[{"role": "user", "content": "x" * 5_000_000}])]
        group = client.run_group([do() for _ in range(3)], None, "m")
        outputs = await results(begin(client, items), items)
        assert {output["pid"] for output in outputs[:24]} == {server.pid for server in servers}
        assert (len(outputs[24]["blob"]), outputs[25]["size"]) == (5_000_000, 5_000_000)
        assert [output["reward"] for output in await group] == [0.0, 1.0, 2.0]
        ended_early = do("slow", t=600)
        (call,) = begin(client, [ended_early])
        await stage.event("start", ended_early["example_id"])
        call.cancel()
        await stage.event("cancelled", ended_early["example_id"])

        monkeypatch.setattr(suspects, "RETURN_S", 60.0)  # the other server must vouch for the link
        items = [do("slow_then", t=2, t_again=0) for _ in range(8)]
        calls = begin(client, items)
        await all_started(stage, items, client)
        servers[0].kill()
        outputs = await results(calls, items)
        assert {output["pid"] for output in outputs} == {servers[1].pid}
        await settled(client)


@pytest.mark.parametrize("client_is_on", ["leaf", "hub"])
async def test_a_link_that_is_cut_and_back_takes_no_rollout_with_it(
    nodes: Cluster, stage: Stage, leaf_node: tuple[Node, Link], client_is_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P24: no side loses its own connection, so only 503s tell; those of a short cut are not believed."""
    monkeypatch.setattr(suspects, "RETURN_S", 60.0)
    node, link = leaf_node
    there, here = (nodes.nodes[1], node) if client_is_on == "leaf" else (node, nodes.nodes[1])
    launch_on(stage, there, max_concurrent=8)
    await stage.ready()
    async with stage.client(address=here.url, settings={"no_server_timeout_s": 30.0}) as client:
        items = [do("slow", t=1), do("slow", t=3), do("big", n=5_000_000)]
        calls = begin(client, items)
        await all_started(stage, items, client)
        await link.cut()
        await suspected(client)
        late = [do() for _ in range(4)]
        late_calls = begin(client, late)
        await stage.event("end", items[0]["example_id"])
        await link.mend()
        await linked(node)
        await results(calls + late_calls, items + late)
        assert client._session is not None
        assert client._session.counts["resent"] == 0
        await settled(client)
    assert set(started(stage, items + late).values()) == {1}
    await stage.idle()


async def test_a_link_that_is_away_for_longer_costs_no_work_of_the_only_server(
    nodes: Cluster, stage: Stage, leaf_node: tuple[Node, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: taken for gone, its jobs wait for any server; it is the first to be back, and goes on with its copies."""
    monkeypatch.setattr(suspects, "RETURN_S", 0.3)
    monkeypatch.setattr(cancels, "REPEAT_S", 0.0)  # what is owed to the server is said before it can grant
    node, link = leaf_node
    launch_on(stage, nodes.nodes[1], max_concurrent=8)
    await stage.ready()
    async with stage.client(address=node.url, settings={"no_server_timeout_s": 30.0}) as client:
        items = [do("slow", t=3) for _ in range(4)]
        calls = begin(client, items)
        await all_started(stage, items, client)
        await link.cut()
        session = client._session
        assert session is not None
        await becomes(lambda: session.counts["resent"] == len(items), what="all are sent again")
        await link.mend()
        await results(calls, items)
        await settled(client)
    assert set(started(stage, items).values()) == {1}
    await stage.idle()
