"""A NATS server as it was provisioned: its folder, its users, and ways to connect as one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from shared_nats import Share, SharedNats
from tcp_server import free_port

from envbus.bus.embedded import EmbeddedNats
from envbus.provision import certificates
from envbus.provision.access import access_of
from envbus.provision.folder import provision


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority and a NATS server's certificate for loopback."""
    folder = tmp_path_factory.mktemp("certs")
    certificates.make(folder)
    return folder


@pytest.fixture
def share(tmp_path: Path, certs: Path) -> Share:
    """Provision and start a NATS server; the arguments are keys of an access file."""

    @asynccontextmanager
    async def shared(*, tls: bool = True, handshake_first: bool = False, **access: object) -> AsyncIterator[SharedNats]:
        listen = {"host": "127.0.0.1", "port": free_port()} | access.pop("listen", {})  # type: ignore[operator]
        encryption = {"certificates": certs, "handshake_first": handshake_first} if tls else None
        users = {"trainers": ["alice", "bob"], "servers": ["gpu1"], "operators": ["ops"]}
        users |= {"controllers": ["ctl1"], "dashboards": ["wall"]}
        spec = access_of(**(users | {"listen": listen, "tls": encryption} | access))  # type: ignore[arg-type]
        folder = tmp_path / "site"
        provision(spec, folder)
        config = (folder / "nats.conf").read_text()
        async with EmbeddedNats(port=listen["port"], config=config) as nats:
            yield SharedNats(nats, spec, folder)

    return shared
