"""Floods of large bodies: many at once, to a caller that blocks, refused by the hundred; nothing is left of them."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from stage import READY_S, Stage, do, run, settled

from envbus.errors import BadRequestError

PROMPT = random.Random(1).randbytes(5_000_000).translate(bytes(range(128)) * 2).decode()
"""5 MB that compression makes no smaller than that by much."""


def with_prompt(size_bytes: int) -> Any:
    return do("echo_size", prompt=[{"role": "user", "content": PROMPT[:size_bytes]}])


async def test_a_burst_of_large_replies_to_a_caller_that_blocks_its_loop(trio: Stage) -> None:
    """P03: 3 servers, 150 replies of 0.9 MB, the caller's loop sleeps for 3 s; none is lost, nothing reconnects."""
    await trio.ready()
    async with trio.client() as client, asyncio.timeout(100):
        await client.wait_for_server(timeout_s=READY_S)
        items = [do("big", n=900_000) for _ in range(150)]
        calls = [asyncio.create_task(run(client, item)) for item in items]
        await asyncio.sleep(0.15)
        time.sleep(3)  # noqa: ASYNC251 - a trainer that computes in its loop
        outputs = await asyncio.gather(*calls)
        assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
        assert {len(output["blob"]) for output in outputs} == {900_000}
        assert client._bus is not None
        assert client._bus.connection.stats.reconnects == 0
        assert client._session is not None
        assert client._session.counts["resent"] == 0
        await settled(client)
    await trio.idle()
    ids = {item["example_id"] for item in items}
    assert sum(entry["example_id"] in ids for entry in trio.events("start")) == 150


async def test_a_result_of_70_mb_arrives_whole(trio: Stage) -> None:
    """P05: the largest of the case."""
    async with trio.client() as client, asyncio.timeout(100):
        await client.wait_for_server(timeout_s=READY_S)
        assert len((await run(client, do("big", n=70_000_000)))["blob"]) == 70_000_000
        await settled(client)
    await trio.idle()


async def test_prompts_that_do_not_compress_go_in_parts(trio: Stage) -> None:
    """P37: 20 of 5 MB against a limit of 1 MB; the tables on both sides are empty afterwards."""
    async with trio.client() as client, asyncio.timeout(100):
        await client.wait_for_server(timeout_s=READY_S)
        outputs = await asyncio.gather(*(run(client, with_prompt(5_000_000)) for _ in range(20)))
        assert {output["size"] for output in outputs} == {5_000_000}
        await settled(client)
    await trio.idle()


async def test_two_hundred_prompts_over_the_ceiling_are_refused_one_by_one(stage: Stage) -> None:
    """P37: each with size, limit and setting, before a byte of the prompt is sent; nothing is left."""
    server = stage.launch(max_concurrent=32, settings={"max_input_bytes": 1_000_000})
    async with stage.client() as client, asyncio.timeout(100):
        await client.wait_for_server(timeout_s=READY_S)
        calls = [run(client, with_prompt(1_100_000)) for _ in range(200)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BadRequestError}
        with pytest.raises(BadRequestError, match=r"1,100,\d\d\d.*1,000,000.*ENVBUS_SERVER_MAX_INPUT_BYTES"):
            raise outcomes[-1]  # type: ignore[misc]
        assert (await run(client, do()))["pid"] == server.pid
        await settled(client)
    await stage.idle()
    assert len(stage.events("start")) == 1
