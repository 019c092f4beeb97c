"""A gateway in front of one server, asked by raw DEALER sockets: answers, cancels, deltas, and what hurt the library's
own servers: wrong frames, ids, garbage.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dealers import Dealer, Dealers, assembled, classic_body, gateway, new_id, pack, task_body, unpack
from stage import Stage, becomes, do

from envbus.adapters.gateway.limits import GatewayLimits
from envbus.errors import UsageError


@pytest.fixture(autouse=True)
async def is_ready(shared: Stage) -> None:
    await shared.ready()


async def test_rollouts_groups_and_health(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        await client.send(b"health", b"ping")
        assert await client.answer(b"health") == {"success": True, "error": None}
        item = do(answer="a")
        answer = await client.rollout(item)
        assert answer["success"]
        assert answer["output"]["example_id"] == item["example_id"]
        assert answer["output"]["reward"] == 1.0
        assert set(answer["output"]["timing"]) >= {"setup", "generation", "scoring", "total"}
        group = await client.rollout(do(), do(), do())
        assert [output["reward"] for output in group["outputs"]] == [0.0, 1.0, 2.0]


async def test_a_failed_rollout_is_an_output_with_its_error(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        answer = await dealers.connect(running).rollout(do("raise", kind="sandbox"))
    assert answer["success"]
    assert answer["output"]["error"]["error"] == "SandboxError"
    assert answer["output"]["error_chain"].count("->") == 1


async def test_what_the_server_refuses_is_an_error(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        answer = await dealers.connect(running).rollout(do(), max_retries=1000)
    assert not answer["success"]
    assert answer["error"].startswith("BadRequestError(")


async def test_cancel_ends_the_rollout_of_the_same_client_only(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        one, other = dealers.connect(running), dealers.connect(running)
        mine, theirs = do(t=600), do(t=600)
        for client, item in ((one, mine), (other, theirs)):
            await client.send(b"same id", classic_body(item))
            await shared.event("start", item["example_id"])
        await one.send(b"same id", b"")
        assert await one.answer(b"same id") == {"success": False, "error": "Request was cancelled"}
        await shared.event("cancelled", mine["example_id"])
        assert not shared.events("cancelled", example_id=theirs["example_id"])
        await one.send(b"unknown", b"")
        assert (await one.rollout(do()))["success"]


async def test_a_cancel_right_behind_its_request(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        await client.send(b"1", classic_body(do(t=600)))
        await client.send(b"1", b"")
        assert not (await client.answer(b"1"))["success"]
    await shared.idle()


async def test_a_closed_connection_cancels_its_rollouts(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        leaving, staying = dealers.connect(running), dealers.connect(running)
        gone, kept = do(t=600), do(t=1)
        await leaving.send(b"1", classic_body(gone))
        await staying.send(b"1", classic_body(kept))
        await shared.event("start", gone["example_id"])
        leaving.socket.close(0)
        await shared.event("cancelled", gone["example_id"])
        assert (await staying.answer(b"1"))["success"]


async def test_deltas_arrive_in_order_before_the_reply(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        await client.send(b"h", b"health", pack({}))
        assert (await client.answer(b"h"))["success"]
        ids = [new_id() for _ in range(4)]
        for request_id in ids:
            await client.send(request_id, b"run", task_body(idx=request_id.decode(), turns=5, t=0.01))
        for request_id in ids:
            deltas, reply = await client.episode(request_id)
            assert assembled(deltas) == {f"{request_id.decode()}-1": [{"turn": turn} for turn in range(5)]}
            assert reply["success"]
            assert reply["head"]["env"] == "stage"
            assert reply["traces"] == [{"id": f"{request_id.decode()}-1", "nodes": 5, "calls": 0}]


async def test_a_run_is_cancelled_by_a_request_of_its_own(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        task = new_id().decode()
        await client.send(b"run", b"run", task_body(idx=task, turns=10_000, t=0.05))
        await shared.event("start", task)
        await client.send(b"c1", b"cancel", pack({"request_id": "run"}))
        assert await client.answer(b"c1") == {"success": True, "error": None, "cancelled": True}
        _, reply = await client.episode(b"run")
        assert reply == {"success": False, "error": "Cancelled: rollout aborted"}
        await shared.event("cancelled", task)
        await client.send(b"c2", b"cancel", pack({"request_id": "run"}))
        assert await client.answer(b"c2") == {"success": True, "error": None, "cancelled": False}


async def test_a_run_that_fails_is_an_error(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        await client.send(b"1", b"run", task_body(idx="r", **{"raise": "the tool broke"}))
        _, reply = await client.episode(b"1")
    assert not reply["success"]
    assert "the tool broke" in reply["error"]


async def test_a_request_that_is_sent_twice_runs_once(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        item = do(t=0.2)
        for _ in range(3):
            await client.send(b"1", classic_body(item))
        assert (await client.answer(b"1"))["success"]
        assert (await client.rollout(do()))["success"]
    assert len(shared.events("start", example_id=item["example_id"])) == 1


async def test_whatever_comes_the_next_request_is_served(shared: Stage, dealers: Dealers) -> None:
    frames: list[list[bytes]] = [
        [b"1"],
        [b""],
        [b"1", b"run", task_body(idx=1), b"4"],
        [b"x"] * 50,
        [b"1", b"\xc1"],
        [b"1", b"\xdf\xff\xff\xff\xff"],
        [b"1", b"\x91" * 5000],
        [b"1", pack([1])],
        [b"\xff\xfe", pack({"request_type": "x"})],
        [b"1", b"", b""],
        [b"1", b"\xff", pack({})],
        [b"1", b"cancel", pack({"request_id": 5})],
        [b"1", b"cancel", b"\xa2\xff\xff"],
    ]
    async with gateway(shared) as running:
        client = dealers.connect(running)
        for each in frames:
            await client.send(*each)
        for number in range(3):
            request_id = b"\xff%d" % number
            await client.send(request_id, classic_body(do(), request_id="elsewhere"))
            assert (await client.answer(request_id))["success"]


async def test_refused_requests_are_answered_in_their_protocol(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        await client.send(b"1", pack({"request_type": "delete"}))
        assert "Unknown request type: delete" in (await client.answer(b"1"))["error"]
        await client.send(b"2", b"evaluate", pack({}))
        _, kind, data = await client.message(b"2")
        assert kind == b"reply"
        assert unpack(data) == {"success": False, "error": "BadRequestError: unknown method 'evaluate'"}


@pytest.mark.parametrize("config", [{"extra_headers": [1]}, {"extra_headers_from_state": [1]}, {5: 1, "x": 2}])
async def test_a_client_config_of_a_wrong_form_is_answered(shared: Stage, dealers: Dealers, config: Any) -> None:
    async with gateway(shared) as running:
        client = dealers.connect(running)
        await client.send(b"1", classic_body(do(), client_config=config))
        assert not (await client.answer(b"1"))["success"]


async def test_a_request_that_is_too_large_is_refused_a_frame_far_over_it_ends_its_connection(
    shared: Stage, dealers: Dealers
) -> None:
    async with gateway(shared, limits=GatewayLimits(max_request_bytes=100_000)) as running:
        client, other = dealers.connect(running), dealers.connect(running)
        assert "over the limit" in (await client.rollout(do(text="x" * 150_000)))["error"]
        item = do(t=600)
        await other.send(b"1", classic_body(item))
        await shared.event("start", item["example_id"])
        await other.send(b"2", b"x" * 300_000)
        await shared.event("cancelled", item["example_id"])
        assert (await client.rollout(do()))["success"]


async def test_too_many_requests_and_clients_are_refused(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared, limits=GatewayLimits(max_requests=1, max_clients=1)) as running:
        client, other = dealers.connect(running), dealers.connect(running)
        await client.send(b"1", classic_body(do(t=600)))
        assert "unanswered requests" in (await client.rollout(do()))["error"]
        assert "start another one" in (await other.rollout(do()))["error"]
        await client.send(b"1", b"")
        await client.answer(b"1")
        assert (await client.rollout(do()))["success"]


async def test_requests_that_would_take_too_much_memory_are_refused(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared, limits=GatewayLimits(max_held_bytes=100_000)) as running:
        client = dealers.connect(running)
        await client.send(b"1", classic_body(do(t=600, text="x" * 90_000)))
        assert "bytes of unanswered requests" in (await client.rollout(do(text="x" * 20_000)))["error"]
        assert (await client.rollout(do()))["success"]


async def test_a_client_that_does_not_read_is_given_up(shared: Stage, dealers: Dealers) -> None:
    limits = GatewayLimits(max_unread_bytes=5_000_000)
    async with gateway(shared, limits=limits) as running:
        deaf, other = dealers.connect(running), dealers.connect(running)
        deaf.socket.rcvhwm = 1
        running_item = do(t=600)
        await deaf.send(b"x", classic_body(running_item))
        await shared.event("start", running_item["example_id"])
        for number in range(400):
            await deaf.send(b"%d" % number, classic_body(do("big", n=1_000_000)))
            if shared.events("cancelled", example_id=running_item["example_id"]):
                break
        await shared.event("cancelled", running_item["example_id"])
        assert (await other.rollout(do()))["success"]
    await shared.idle()


async def test_an_idle_client_leaves_the_bus_and_comes_back(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared, limits=GatewayLimits(idle_s=0.1, probe_interval_s=0.05)) as running:
        client = dealers.connect(running)
        assert (await client.rollout(do()))["success"]
        await becomes(lambda: not running.listeners[0]._callers)
        assert (await client.rollout(do()))["success"]


async def test_many_listeners_in_one_process(shared: Stage, dealers: Dealers) -> None:
    async with gateway(shared, listeners=3) as running:
        clients = [dealers.connect(running, number) for number in range(3)]
        answers = await asyncio.gather(*(client.rollout(do()) for client in clients))
        assert all(answer["success"] for answer in answers)
        with pytest.raises(UsageError, match="cannot listen"):
            await gateway_on(running.listeners[0].address, shared)
    for address in ("http://x", "tcp://127.0.0.1"):
        with pytest.raises(UsageError, match="cannot listen"):
            await gateway_on(address, shared)


async def gateway_on(address: str, stage: Stage) -> None:
    taken = gateway(stage)
    taken._places = [(address, "stage")]
    async with taken:
        pass


async def test_what_runs_when_the_gateway_stops(shared: Stage, dealers: Dealers) -> None:
    """The new client is told, since it would wait for ever; the classic one asks again by itself."""
    items = [do(t=600), {"example_id": new_id().decode()}]
    async with gateway(shared) as running:
        client = dealers.connect(running)
        await client.send(b"1", classic_body(items[0]))
        await client.send(b"2", b"run", task_body(idx=items[1]["example_id"], turns=10_000, t=0.05))
        for item in items:
            await shared.event("start", item["example_id"])
    for item in items:
        await shared.event("cancelled", item["example_id"])
    _, reply = await client.episode(b"2")
    assert reply == {"success": False, "error": "Cancelled: the gateway stops"}
    assert await drained(client) == []


async def drained(client: Dealer) -> list[Any]:
    left = []
    while await client.socket.poll(100):
        left.append(await client.socket.recv_multipart())
    return [frames for frames in left if frames[0] != b"envbus-probe"]
