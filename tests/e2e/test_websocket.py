"""NATS over a websocket: a client behind a proxy that lets only HTTP through."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from stage import CLIENT_SETTINGS, READY_S, Stage, do

from envbus import ClientSettings, NATSEnvClient
from envbus.bus.address import resolve_bus_options
from envbus.bus.connection import Connection
from envbus.bus.embedded import EmbeddedNats
from envbus.errors import BusUnreachableError

# nats-py 2.16 opens the websocket with an argument that aiohttp calls outdated.
pytestmark = pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")


@pytest.fixture
async def two_doors() -> AsyncIterator[EmbeddedNats]:
    """A nats-server with a port for nats:// and one for ws://."""
    async with EmbeddedNats(config='websocket { host: "127.0.0.1", port: -1, no_tls: true }') as nats:
        yield nats


def client_at(url: str, stage: Stage) -> NATSEnvClient:
    return NATSEnvClient(url, name=stage.name, prefix=stage.prefix, settings=ClientSettings(**CLIENT_SETTINGS))


async def test_a_client_over_ws_calls_a_server_over_nats(two_doors: EmbeddedNats, tmp_path: Path) -> None:
    stage = Stage(two_doors.url, tmp_path)
    try:
        stage.launch()
        async with client_at(two_doors.ports["websocket"][0], stage) as client:
            await client.wait_for_server(timeout_s=READY_S)
            texts = ["x" * size for size in (1, 1000, 3_000_000)]
            items = [do("return", value=text) for text in texts]
            outputs = await asyncio.gather(*(client.run_rollout(item, None, "m") for item in items))
        assert [output["odd"] for output in outputs] == texts
    finally:
        stage.close()


async def test_a_ws_address_where_nobody_listens_is_an_error(two_doors: EmbeddedNats) -> None:
    url = two_doors.ports["websocket"][0]
    await two_doors.kill()
    connection = Connection(resolve_bus_options(url), name="test")
    with pytest.raises(BusUnreachableError, match="connection refused"):
        await connection.open(timeout_s=20)
    await connection.close()
    gc.collect()  # what aiohttp has left open warns now


async def test_a_ws_connection_comes_back(two_doors: EmbeddedNats) -> None:
    """The websocket port is fixed here: it must be the same after the restart."""
    port = int(two_doors.ports["websocket"][0].rpartition(":")[2])
    await two_doors.stop()
    config = f'websocket {{ host: "127.0.0.1", port: {port}, no_tls: true }}'
    async with EmbeddedNats(config=config) as nats:
        connection = Connection(resolve_bus_options(f"ws://127.0.0.1:{port}"), name="test")
        await connection.open(timeout_s=20)
        await nats.kill()
        await nats.restart()
        async with asyncio.timeout(60):
            await connection.wait_up()
        token = connection.inbox.route(lambda message: connection.send(message.reply, message.data))
        reply = await connection.request(connection.inbox.reply_subject(token), b"again", timeout_s=20)
        assert reply == b"again"
        await connection.close()
    gc.collect()
