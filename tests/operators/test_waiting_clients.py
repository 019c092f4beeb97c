"""What a client that waits for a server is told when it hears heartbeats but gets no answer; made-up beats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
import pytest
from fleet_beats import beat

from envbus import ClientSettings, NATSEnvClient
from envbus.bus.messages import pack
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


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ("loading", ServerLoadingError, "is there but did not answer"),
        ("ready", ServerLoadingError, "is there but did not answer"),
        ("draining", NoServerError, "takes jobs: those that are there end"),
    ],
)
async def test_a_server_that_is_there_is_not_called_absent(
    nats_url: str, prefix: str, state: str, error: type[EnvbusError], words: str
) -> None:
    """P59: one that came up as the time for servers to appear ended is waited for; its name is no typo of itself."""
    async with beating(nats_url, prefix, state), NATSEnvClient(
        nats_url, name="gsm8k", prefix=prefix, settings=HASTY
    ) as client:  # fmt: skip
        with pytest.raises(error, match=words) as told:
            await client.wait_for_server()
    assert "did you mean" not in str(told.value)
