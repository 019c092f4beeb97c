"""Two gateways and an evaluation share one fleet: each connection of a gateway stands in the waiting line by itself."""

from __future__ import annotations

import asyncio
from collections import Counter

from dealers import Dealers, classic_body, gateway
from stage import Stage, do, run

EACH = 60
SLOTS = 4


async def test_two_gateways_and_an_evaluation_share_a_fleet(stage: Stage, dealers: Dealers) -> None:
    stage.launch(max_concurrent=SLOTS)
    await stage.ready()
    batches = {name: [do(t=0.03) for _ in range(EACH)] for name in ("one", "two", "eval")}
    owner = {item["example_id"]: name for name, items in batches.items() for item in items}
    blocker = [do(t=3) for _ in range(SLOTS)]
    async with gateway(stage) as one, gateway(stage) as two, stage.client() as evaluation:
        holding = [asyncio.create_task(run(evaluation, item)) for item in blocker]
        for item in blocker:
            await stage.event("start", item["example_id"])
        sockets = {"one": dealers.connect(one), "two": dealers.connect(two)}
        for name, socket in sockets.items():  # all of them wait before a slot is free
            for item in batches[name]:
                await socket.send(item["example_id"].encode(), classic_body(item))
        waiting = [asyncio.create_task(run(evaluation, item)) for item in batches["eval"]]
        async with stage.beats() as beats:
            await beats.until(lambda now: any(beat.waiting_clients >= 3 for beat in now))
        for name, socket in sockets.items():
            for item in batches[name]:
                assert (await socket.answer(item["example_id"].encode()))["success"]
        await asyncio.gather(*waiting, *holding)
    started = [owner[entry["example_id"]] for entry in stage.events("start") if entry["example_id"] in owner]
    while_all_waited = Counter(started[: 3 * EACH // 2])
    assert min(while_all_waited[name] for name in batches) >= EACH // 3, while_all_waited


async def test_clients_of_one_gateway_share_a_fleet(stage: Stage, dealers: Dealers) -> None:
    """A client with many requests does not hold up one with few."""
    stage.launch(max_concurrent=SLOTS)
    await stage.ready()
    many, few = [do(t=0.03) for _ in range(3 * EACH)], [do(t=0.03) for _ in range(5)]
    async with gateway(stage) as running:
        greedy, modest = dealers.connect(running), dealers.connect(running)
        for item in many:
            await greedy.send(item["example_id"].encode(), classic_body(item))
        await stage.event("start", many[0]["example_id"])
        for item in few:
            await modest.send(item["example_id"].encode(), classic_body(item))
        for item in few:
            assert (await modest.answer(item["example_id"].encode()))["success"]
        ended = len(stage.events("end"))
        for item in many:
            assert (await greedy.answer(item["example_id"].encode()))["success"]
    assert ended < 2 * EACH
