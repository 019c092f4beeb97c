"""One plain NATS request gets exactly one reply, with no more of envbus than a msgpack map."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import nats
import pytest
from nats.aio.client import Client
from stage import READY_S, Stage, do


@pytest.fixture
async def bare(shared: Stage) -> AsyncIterator[Client]:
    """A NATS client that knows nothing of envbus; the stage's server is ready."""
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
    connection = await nats.connect(shared.url)
    await connection.request(f"{shared.prefix}.stage.info", b"", timeout=20)  # its reply inbox is there from here on
    yield connection
    await connection.close()


async def replies_to(bare: Client, subject: str, data: bytes) -> list[Any]:
    """Send one request and return every reply that comes before a second request, sent later, is answered."""
    replies: list[Any] = []
    came = asyncio.Event()

    async def on_reply(message: Any) -> None:
        replies.append(msgpack.unpackb(message.data))
        came.set()

    inbox = bare.new_inbox()
    subscription = await bare.subscribe(inbox, cb=on_reply)
    await bare.publish(subject, data, reply=inbox)
    async with asyncio.timeout(20):
        await came.wait()
    await bare.request(subject, msgpack.packb({"input": do("slow", t=0.05), "model": "m"}), timeout=20)
    await subscription.unsubscribe()
    return replies


async def served(bare: Client, subject: str) -> None:
    """Have one rollout run, as soon as the server has given up the credit that another message used."""
    async with asyncio.timeout(20):
        while True:
            try:
                await bare.request(subject, msgpack.packb({"input": do(), "model": "m"}), timeout=20)
                return
            except nats.errors.NoRespondersError:
                await asyncio.sleep(0.01)


async def test_a_rollout(shared: Stage, bare: Client) -> None:
    item = do("return", value=[1, "two"])
    (reply,) = await replies_to(bare, f"{shared.prefix}.stage.rollout", msgpack.packb({"input": item, "model": "m"}))
    assert reply["ok"] is True
    assert reply["output"]["odd"] == [1, "two"]
    assert reply["output"]["example_id"] == item["example_id"]
    await shared.idle()


async def test_a_group(shared: Stage, bare: Client) -> None:
    items = [do(), do()]
    data = msgpack.packb({"group_inputs": items, "model": "m"})
    (reply,) = await replies_to(bare, f"{shared.prefix}.stage.rollout", data)
    assert [output["example_id"] for output in reply["outputs"]] == [item["example_id"] for item in items]


async def test_a_rollout_that_raises_is_a_result_with_an_error(shared: Stage, bare: Client) -> None:
    """P30."""
    data = msgpack.packb({"input": do("raise", kind="own"), "model": "m"})
    (reply,) = await replies_to(bare, f"{shared.prefix}.stage.rollout", data)
    assert reply["ok"] is True
    assert reply["output"]["error"]["error"] == "StageBrokenError"
    assert reply["output"]["reward"] is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", ""),
        (b"\xc1 no msgpack", ""),
        (msgpack.packb([1, 2]), "map"),
        (msgpack.packb({}), "input"),
        (msgpack.packb({"input": 5, "model": "m"}), "map"),
        (msgpack.packb({"input": {}, "group_inputs": [{}], "model": "m"}), "either"),
        (msgpack.packb({"group_inputs": [], "model": "m"}), "group_inputs"),
        (msgpack.packb({"group_inputs": [{}] * 100_001, "model": "m"}), "group_inputs"),
        (msgpack.packb({"input": {}, "model": 7}), "model"),
        (msgpack.packb({"input": {}, "client": {"api_base_url": 3}}), "api_base_url"),
        (msgpack.packb({"v": 99, "input": {}}), "version"),
    ],
)
async def test_what_is_no_request_gets_one_error(shared: Stage, bare: Client, data: bytes, says: str) -> None:
    """The same form for every error, and the credit it used is not lost: the next request is served."""
    for _ in range(5):
        (reply,) = await replies_to(bare, f"{shared.prefix}.stage.rollout", data)
        assert reply["ok"] is False
        assert reply["error"]["code"] in ("bad_request", "decode", "protocol_version")
        assert says in reply["error"]["message"]
    await shared.idle()


async def test_a_result_over_max_payload_is_one_error(shared: Stage, bare: Client) -> None:
    """P05: with sizes, and the way out."""
    data = msgpack.packb({"input": do("big", n=1_500_000), "model": "m"})
    (reply,) = await replies_to(bare, f"{shared.prefix}.stage.rollout", data)
    assert reply["ok"] is False
    assert reply["error"]["code"] == "payload_too_large"
    assert "1,500,0" in reply["error"]["message"]
    assert "1,048,576" in reply["error"]["message"]


async def test_a_full_server_gives_a_plain_request_a_503(stage: Stage) -> None:
    """It cannot wait in line: NATS itself says that nobody takes it now."""
    stage.launch(max_concurrent=1)
    await stage.ready()
    connection = await nats.connect(stage.url)
    held = do("slow", t=1)
    subject = f"{stage.prefix}.stage.rollout"
    first = asyncio.create_task(connection.request(subject, msgpack.packb({"input": held, "model": "m"}), timeout=60))
    await stage.event("start", held["example_id"])
    with pytest.raises(nats.errors.NoRespondersError):
        await connection.request(subject, msgpack.packb({"input": do(), "model": "m"}), timeout=20)
    assert msgpack.unpackb((await first).data)["ok"] is True
    await connection.close()
    await stage.idle()


async def test_a_long_rollout_gets_one_reply_too(shared: Stage, bare: Client) -> None:
    """Longer than probe_after_s: a plain asker is not probed, for the probe would be a second reply."""
    data = msgpack.packb({"input": do("slow", t=1.5), "model": "m"})
    (reply,) = await replies_to(bare, f"{shared.prefix}.stage.rollout", data)
    assert reply["ok"] is True
    assert reply["output"]["reward"] == 1.0


@pytest.mark.parametrize("reply", ["", "somewhere.else", "env.stage.ctl.all", "$SYS.REQ.SERVER.PING"])
async def test_a_request_without_an_inbox_to_reply_to_does_not_run(shared: Stage, bare: Client, reply: str) -> None:
    """A server replies to inboxes only, so that no request makes it publish on another's subject."""
    heard: list[Any] = []

    async def on_any(message: Any) -> None:
        heard.append(message)

    subscription = await bare.subscribe("listens.nowhere" if reply[:1] in ("", "$") else reply, cb=on_any)
    item = do()
    subject = f"{shared.prefix}.stage.rollout"
    for _ in range(6):
        await bare.publish(subject, msgpack.packb({"input": item, "model": "m"}), reply=reply)
        await served(bare, subject)
    await shared.idle()
    await subscription.unsubscribe()
    assert heard == []
    assert shared.events("start", example_id=item["example_id"]) == []
