"""The connection in a cluster: nodes that the address does not name are found, and stay known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nodes import Cluster
from stage import becomes

from envbus.bus.address import resolve_bus_options
from envbus.bus.connection import Connection
from envbus.errors import BusUnreachableError


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    connection = Connection(resolve_bus_options(url), name="test")
    await connection.open(timeout_s=10)
    try:
        yield connection
    finally:
        await connection.close()


async def echoes(connection: Connection, subject: str) -> None:
    """A request to a subscription of one's own comes back."""
    assert await connection.request(subject, b"hello", timeout_s=10) == b"hello"


async def test_one_address_is_enough_to_outlive_its_node(nodes: Cluster, prefix: str) -> None:
    """P10: the node that the address names is gone for good; also a new client of nats-py finds the others."""
    dying = nodes.nodes[0]
    async with connected(dying.url) as connection:
        first = connection.node
        await connection.subscribe(f"{prefix}.x", lambda message: connection.send(message.reply, message.data))
        await echoes(connection, f"{prefix}.x")
        await dying.nats.kill()
        await becomes(lambda: connection.is_up and connection.node != first, what="another node")
        await echoes(connection, f"{prefix}.x")
        assert connection._client is not None
        assert connection._client._transport is not None
        connection._client._transport.write(b"NONSENSE\r\n")  # closes a client of nats-py for good
        await becomes(lambda: connection.stats.rebuilds > 0 or connection.stats.reconnects > 1, what="a new client")
        await echoes(connection, f"{prefix}.x")
        await connection._client.close()
        await becomes(lambda: connection.stats.rebuilds > 0 and connection.is_up, what="a new client")
        await echoes(connection, f"{prefix}.x")


async def test_a_dead_node_among_the_addresses_does_not_matter(nodes: Cluster, prefix: str) -> None:
    """P58: neither to a first connection; with all of them dead it ends in time."""
    await nodes.nodes[0].nats.kill()
    async with connected(nodes.urls) as connection:
        await connection.subscribe(f"{prefix}.x", lambda message: connection.send(message.reply, message.data))
        await echoes(connection, f"{prefix}.x")
    await asyncio.gather(*(node.nats.kill() for node in nodes.nodes[1:]))
    late = Connection(resolve_bus_options(nodes.urls), name="test")
    async with asyncio.timeout(20):
        with pytest.raises(BusUnreachableError, match="connection refused"):
            await late.open(timeout_s=1)
    await late.close()


# nats-py 2.16 opens the websocket with an argument that aiohttp calls outdated.
@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")
async def test_websocket_addresses_are_kept_to(nodes: Cluster, prefix: str) -> None:
    """P10: nats-py takes the others' WebSocket ports, of which NATS tells, for ports of plain NATS."""
    urls = [node.nats.ports["websocket"][0] for node in nodes.nodes[:2]]
    async with connected(",".join(urls)) as connection:
        await connection.subscribe(f"{prefix}.x", lambda message: connection.send(message.reply, message.data))
        for _ in range(8):
            before, node = connection.stats.reconnects, connection.node
            assert connection._client is not None
            await connection._client.force_reconnect()
            await becomes(lambda before=before: connection.stats.reconnects > before, what=f"away from {node}")
            await echoes(connection, f"{prefix}.x")
        assert connection.stats.errors == 0
