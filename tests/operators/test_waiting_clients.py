"""What a client that waits for a server is told when it hears heartbeats but gets no answer; made-up beats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from fleet_beats import beat

from envbus import ClientSettings, NATSEnvClient
from envbus.bus.codec import encode
from envbus.bus.failures import to_failure
from envbus.bus.messages import ExamplesPage, pack
from envbus.bus.subjects import Subjects
from envbus.errors import EnvbusError, NoServerError, ServerLoadingError

HASTY = ClientSettings(no_server_timeout_s=0.2, loading_timeout_s=2.5)


@asynccontextmanager
async def beating(url: str, prefix: str, state: str) -> AsyncIterator[None]:
    """The beats of a server in a state that answers nothing."""
    connection = await nats.connect(url)

    async def beat_on() -> None:
        while True:
            await connection.publish(Subjects("gsm8k", prefix).beat("a1"), pack(beat(state=state)))
            await asyncio.sleep(0.1)

    beats = asyncio.create_task(beat_on())
    try:
        yield
    finally:
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        await connection.close()


SILENT: dict[str, tuple[type[EnvbusError], str]] = {
    "loading": (ServerLoadingError, "is there but did not answer"),
    "ready": (ServerLoadingError, "is there but did not answer"),
    "draining": (NoServerError, "takes jobs: those that are there end"),
}


async def told(url: str, prefix: str, state: str) -> str:
    """What a client is told that waits for a server in this state."""
    error, words = SILENT[state]
    async with (
        beating(url, prefix, state),
        NATSEnvClient(url, name="gsm8k", prefix=prefix, settings=HASTY) as client,
    ):
        with pytest.raises(error, match=words) as caught:
            await client.wait_for_server()
    return str(caught.value)


async def test_a_server_that_is_there_is_not_called_absent(nats_url: str, prefix: str) -> None:
    """P59: one that came up as the time for servers to appear ended is waited for; its name is no typo of itself."""
    all_told = await asyncio.gather(*(told(nats_url, f"{prefix}-{state}", state) for state in SILENT))
    assert "did you mean" not in "".join(all_told)


async def test_the_eval_set_is_read_while_some_servers_load(nats_url: str, prefix: str) -> None:
    """NATS may ask any server for a page: one that still loads as well as the one that is ready."""
    loading = to_failure(ServerLoadingError("the environment is still loading"), origin="a1")
    page = ExamplesPage(total=1, start=0, body=encode({"examples": [{"prompt": [], "example_id": 0}]}))
    answers = [pack(loading), pack(loading), pack(page)]

    async def answer(message: Any) -> None:
        await message.respond(answers.pop(0))

    connection = await nats.connect(nats_url)
    try:
        await connection.subscribe(Subjects("gsm8k", prefix).examples, cb=answer)
        await connection.flush()
        async with NATSEnvClient(nats_url, name="gsm8k", prefix=prefix, settings=ClientSettings()) as client:
            assert [row["example_id"] for row in await client.examples()] == [0]
        assert answers == []
    finally:
        await connection.close()
