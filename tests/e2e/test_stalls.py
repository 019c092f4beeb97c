"""Large results in the making: the loops on both sides go on, nothing is lost, and nothing in them changes (P34)."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

from stage import READY_S, Stage, do, run, settled
from stage_env import tokens

from envbus import NATSEnvClient
from envbus.bus.codec import decode, encode
from envbus.errors import BusClosedError

TOKENS, AT_ONCE = 400_000, 6


def thread_s(work: Any, value: Any) -> tuple[float, Any]:
    """Processor time, since the machine does other things too."""
    started = time.thread_time()
    result = work(value)
    return time.thread_time() - started, result


async def server_loop_s(client: NATSEnvClient) -> float:
    return float((await run(client, do("clock")))["thread_s"])


async def test_large_results_are_packed_and_unpacked_beside_the_loops(stage: Stage) -> None:
    """P34: the loops' own threads do a small part of the work, and requests are answered meanwhile."""
    stage.launch(max_concurrent=32)
    async with stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        output = await run(client, do("tokens", n=TOKENS))  # the server makes them once
        encode_s, body = thread_s(encode, output)
        decode_s, _ = thread_s(decode, body)
        del output, body
        server_before, here_before = await server_loop_s(client), time.thread_time()
        calls = [asyncio.create_task(run(client, do("tokens", n=TOKENS))) for _ in range(AT_ONCE)]
        answered = 0
        while not all(call.done() for call in calls):
            await client.info()
            answered += 1
        here_s = time.thread_time() - here_before
        assert {len(call.result()["logprobs"]) for call in calls} == {TOKENS}
        assert (await server_loop_s(client)) - server_before < 0.6 * AT_ONCE * encode_s
        assert here_s < 0.6 * AT_ONCE * decode_s
        assert answered > AT_ONCE


async def test_what_an_env_changes_later_does_not_show(shared: Stage) -> None:
    """P34: an env that returns the same list each time, and fills it anew."""
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        fills = [3 * number for number in range(4)]
        outputs = await asyncio.gather(*(run(client, do("reuse", n=150_000, fill=fill)) for fill in fills))
        assert [set(output["ids"]) for output in outputs] == [{fill} for fill in fills]
        await settled(client)
    await shared.idle()


async def test_jobs_cancelled_while_they_are_packed_leave_nothing_behind(shared: Stage) -> None:
    """P34, P06."""
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        kept = asyncio.create_task(run(client, do("tokens", n=TOKENS)))
        calls = []
        for number in range(4):
            item = do("tokens", n=TOKENS)
            calls.append(asyncio.create_task(run(client, item)))
            if number:
                await shared.event("end", item["example_id"])
            calls[-1].cancel()
        assert {type(end) for end in await asyncio.gather(*calls, return_exceptions=True)} == {asyncio.CancelledError}
        assert len((await kept)["ids"]) == TOKENS
        await settled(client)
    await shared.idle()


async def test_a_server_that_drains_packs_and_delivers_what_has_ended(stage: Stage) -> None:
    """P34, P16."""
    server = stage.launch(max_concurrent=4)
    async with stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        calls = [asyncio.create_task(run(client, do("tokens", n=TOKENS))) for _ in range(4)]
        await stage.event("end", count=4)
        server.signal(signal.SIGTERM)
        assert {len(output["ids"]) for output in await asyncio.gather(*calls)} == {TOKENS}
        assert await server.exit_code() == 0


async def test_a_client_closed_while_results_are_unpacked_ends_every_call(shared: Stage) -> None:
    """P34, P11: with the result, or with the error of a closed client; the threads end (no_leaks)."""
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        calls = [asyncio.create_task(run(client, do("tokens", n=TOKENS))) for _ in range(4)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(end, dict) for end in ends)
    assert all(isinstance(end, dict | BusClosedError) for end in ends)
    await shared.idle()


async def test_a_large_input_is_packed_and_unpacked_beside_the_loops(stage: Stage) -> None:
    """P34, P37."""
    stage.launch()
    async with stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        item = do("clock", tokens=tokens(TOKENS))
        encode_s, body = thread_s(encode, item)
        decode_s, _ = thread_s(decode, body)
        server_before, here_before = await server_loop_s(client), time.thread_time()
        server_after = (await run(client, item))["thread_s"]
        assert time.thread_time() - here_before < 0.6 * encode_s
        assert server_after - server_before < 0.6 * decode_s
