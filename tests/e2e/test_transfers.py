"""Bodies larger than one message, in both directions, on a nats-server with its stock limit of 1 MB."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from stage import READY_S, Stage, becomes, do, run, settled

from envbus.bus.messages import Part, WireMessage
from envbus.errors import BadRequestError, EncodeError, ResultTooLargeError

MIB = 1024 * 1024


@pytest.mark.parametrize("size_bytes", [100, 300_000, 1_048_000, 1_500_000, 20_000_000])
async def test_a_result_arrives_whole(shared: Stage, size_bytes: int) -> None:
    """P05: under and over max_payload, just below it, incompressible."""
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        output = await run(client, do("big", n=size_bytes))
        assert len(output["blob"]) == size_bytes
        await settled(client)
    await shared.idle()


@pytest.mark.parametrize("side", ["server", "client"])
async def test_a_result_over_the_ceiling_says_so_at_once(stage: Stage, side: str) -> None:
    """P05: sizes, limit and the knob are in the error; the server goes on."""
    stage.launch(settings={"max_result_bytes": MIB} if side == "server" else {})
    settings = {"max_result_bytes": MIB} if side == "client" else {}
    async with stage.client(settings=settings) as client:
        await client.wait_for_server(timeout_s=READY_S)
        before = time.monotonic()
        knob = f"ENVBUS_{side.upper()}_MAX_RESULT_BYTES"
        with pytest.raises(ResultTooLargeError, match=rf"3,000,\d\d\d bytes.*1,048,576.*{knob}") as caught:
            await run(client, do("big", n=3_000_000))
        assert time.monotonic() - before < 15
        assert not caught.value.retryable
        assert (await run(client, do()))["reward"] == 1.0
        await settled(client)
    await stage.idle()


async def test_an_input_over_the_ceiling_is_refused_and_frees_its_slot(stage: Stage) -> None:
    """P37."""
    stage.launch(max_concurrent=1, settings={"max_input_bytes": MIB})
    async with stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        with pytest.raises(BadRequestError, match="MAX_INPUT_BYTES"):
            await run(client, do("echo_size", prompt=[{"role": "user", "content": random_text(2_000_000)}]))
        assert (await run(client, do()))["reward"] == 1.0
    await stage.idle()


async def test_an_input_that_cannot_be_encoded_leaves_nothing_behind(shared: Stage) -> None:
    """P37: a refusal before the send path."""
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    async with shared.client() as client:
        with pytest.raises(EncodeError):
            await run(client, do("return", value=deep))
        await settled(client)


async def test_two_hundred_calls_with_large_prompts_leave_nothing_behind(shared: Stage) -> None:
    """P37: 5 MB each, against a limit of 1 MB: all run, and the tables on both sides are empty."""
    content = "x" * 5_000_000
    async with shared.client() as client:
        items = [do("echo_size", prompt=[{"role": "user", "content": content}]) for _ in range(200)]
        outputs = await asyncio.gather(*(run(client, item) for item in items))
        assert {output["size"] for output in outputs} == {5_000_000}
        await settled(client)
    await shared.idle()


async def test_large_both_ways_is_sent_once(shared: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """P37: the announcement of a large result does not set off the input's upload again."""
    sent: list[int] = []
    async with shared.client() as client:
        assert client._session is not None
        ask = client._session._large._transfers._ask

        async def counted(server: str, make: Callable[[], WireMessage]) -> WireMessage:
            if isinstance(message := make(), Part):
                sent.append(message.index)
            return await ask(server, make)

        monkeypatch.setattr(client._session._large._transfers, "_ask", counted)
        text = random_text(3_000_000)
        output = await run(client, do("big", n=3_000_000, prompt=[{"role": "user", "content": text}]))
        assert len(output["blob"]) == 3_000_000
        await settled(client)
    assert sorted(sent) == sorted(set(sent))
    assert len(sent) > 2
    await shared.idle()


async def test_many_large_results_reach_a_client_whose_loop_is_blocked(shared: Stage) -> None:
    """P03: the caller's loop sleeps for a second; the results come in meanwhile, none is lost."""
    async with shared.client() as client:
        calls = [asyncio.create_task(run(client, do("big", n=900_000))) for _ in range(40)]
        await asyncio.sleep(0.05)
        time.sleep(1)  # noqa: ASYNC251 - a caller that blocks its loop
        outputs = await asyncio.gather(*calls)
        assert {len(output["blob"]) for output in outputs} == {900_000}
        assert client._bus is not None
        assert client._bus.connection.stats.reconnects == 0
    await shared.idle()


async def test_a_server_that_stalls_during_an_upload_does_not_swallow_the_job(stage: Stage) -> None:
    """P37, P12: parts that are not taken in time send the job elsewhere, in the end to the same server."""
    server = stage.launch()
    async with stage.client(settings={"part_retries": 1, "stall_timeout_s": 60.0}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        assert client._session is not None
        item = do("echo_size", prompt=[{"role": "user", "content": random_text(30_000_000)}])
        call = asyncio.create_task(run(client, item))
        session = client._session
        await becomes(lambda: bool(session._attempts.holders()))
        with server.frozen():
            await asyncio.sleep(2.6)  # longer than one part may take
        async with asyncio.timeout(60):
            assert (await call)["size"] == 30_000_000
        await settled(client)
    await stage.idle()


def random_text(size: int) -> str:
    """Text that does not compress to fit one message."""
    import random

    return random.Random(size).randbytes(size // 2).hex()
