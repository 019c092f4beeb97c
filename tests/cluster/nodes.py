"""NATS clusters of a test: three nats-server processes in a full mesh, and a leaf node that a proxy links to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from envbus.bus.embedded import EmbeddedNats
from envbus.bus.thread import BusThread
from envbus.errors import UsageError

MESH_S = 20.0
WEBSOCKET = 'websocket { host: "127.0.0.1", port: -1, no_tls: true }'


def free_ports(count: int) -> list[int]:
    """Ports for servers that must know each other's before they start."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Node:
    """One server of a cluster; ``nats`` is its process."""

    def __init__(self, name: str, config: str, directory: Path, *, port: int = 0) -> None:
        self.name = name
        self.nats = EmbeddedNats(
            port=port,
            config=f'server_name: {name}\nhttp: "127.0.0.1:-1"\n{WEBSOCKET}\n{config}',
            log_file=directory / f"{name}.log",
        )

    @property
    def url(self) -> str:
        return self.nats.url

    async def monitor(self, page: str) -> dict[str, Any]:
        """Read a page of its monitoring; its port changes with a restart."""
        url = self.nats.ports["monitoring"][0]
        async with aiohttp.ClientSession() as http, http.get(f"{url}/{page}") as answer:
            values: dict[str, Any] = await answer.json()
        return values

    async def count(self, page: str, field: str) -> int:
        """How many others a list on that page names."""
        return len({entry.get("remote_name", entry.get("name")) for entry in (await self.monitor(page))[field] or ()})


class Cluster:
    """Three nodes."""

    def __init__(self, directory: Path) -> None:
        clients, routes = free_ports(3), free_ports(3)
        self.leaf_port = free_ports(1)[0]
        peers = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
        self.nodes = [
            Node(
                f"n{number}",
                f"cluster {{ name: c, listen: '127.0.0.1:{route}', routes: [{peers}] }}\n"
                + (f"leafnodes {{ listen: '127.0.0.1:{self.leaf_port}', no_advertise: true }}" if number == 0 else ""),
                directory,
                port=client,
            )
            for number, (client, route) in enumerate(zip(clients, routes, strict=True))
        ]

    @property
    def urls(self) -> str:
        """All addresses, as an operator gives them."""
        return ",".join(f"nats://127.0.0.1:{node.nats._port}" for node in self.nodes)

    async def meshed(self, nodes: Iterable[Node] | None = None) -> None:
        """Wait until these nodes (default: all) have routes to each other."""
        wanted = list(nodes or self.nodes)
        async with asyncio.timeout(MESH_S):
            for node in wanted:
                while await node.count("routez", "routes") < len(wanted) - 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        yield await _started(directory, stack)


async def _started(directory: Path, stack: contextlib.AsyncExitStack) -> Cluster:
    for tries_left in (2, 1, 0):
        own = Cluster(directory)
        try:
            for node in own.nodes:
                await stack.enter_async_context(node.nats)
        except UsageError:  # another process was faster to take one of the ports
            await stack.aclose()
            if not tries_left:
                raise
        else:
            break
    await own.meshed()
    return own


class Link:
    """A TCP proxy to one port, on a thread of its own, that can be cut and mended again."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._thread = BusThread("link")
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def mend(self) -> None:
        await self._thread.run(self._listen())

    async def cut(self) -> None:
        """Refuse connections and reset those that are there."""
        await self._thread.run(self._abort())

    async def close(self) -> None:
        await self.cut()
        await asyncio.to_thread(self._thread.stop)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _abort(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers |= {writer, back}
            await asyncio.gather(_pump(reader, back), _pump(there, writer))
            self._writers -= {writer, back}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def leaf(own: Cluster, directory: Path) -> AsyncIterator[tuple[Node, Link]]:
    """A leaf node of the cluster and the link between them."""
    link = Link(own.leaf_port)
    await link.mend()
    config = f'leafnodes {{ reconnect: "200ms", remotes: [{{ url: "nats-leaf://127.0.0.1:{link.port}" }}] }}'
    node = Node("leaf", config, directory)
    try:
        async with node.nats:
            await linked(node)
            yield node, link
    finally:
        await link.close()


async def linked(node: Node, count: int = 1) -> None:
    """Wait until a leaf node has (or has lost) its link."""
    async with asyncio.timeout(MESH_S):
        while await node.count("leafz", "leafs") != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
