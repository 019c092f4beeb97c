"""Getting hold of credentials, or in without them: a false NATS server that offers no TLS or has another authority's
certificate, a user without a certificate or with the wrong seed."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attacked_bus import AttackedBus, generated, new_seed, public_key
from tcp_server import free_port, tcp_server
from wire import RefusedError, Wire

from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.connection import Connection
from envbus.bus.embedded import EmbeddedNats
from envbus.errors import BusError
from envbus.provision import certificates
from envbus.provision.access import access_of
from envbus.provision.folder import provision

GREETING: dict[str, Any] = {
    "server_id": "N1", "version": "2.10.0", "proto": 1, "nonce": "abcdefghijk", "auth_required": True,
    "headers": True, "max_payload": 1048576,
}  # fmt: skip


class FalseNats:
    """Greets as a NATS server does, and keeps what it is told."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.told = b""
        self.greeted = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, tls: ssl.SSLContext | None = None) -> AsyncIterator[FalseNats]:
        async with tcp_server(lambda reader, writer: false._greet(reader, writer, tls)) as port:
            false = cls(port)
            yield false

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: Any) -> None:
        writer.write(b"INFO " + json.dumps(GREETING | {"tls_required": tls is not None}).encode() + b"\r\n")
        await writer.drain()
        self.greeted += 1
        if tls is not None:
            await writer.start_tls(tls)
        self.told += await reader.read(4096)
        writer.write(b"-ERR 'Authorization Violation'\r\n")
        await writer.drain()


async def connect(options: BusOptions) -> None:
    """As envbus does; whether it is let in or not."""
    connection = Connection(options, name="victim")
    try:
        await connection.open(timeout_s=0.5)
    except BusError:
        pass
    finally:
        await connection.close()


@pytest.mark.parametrize("credentials", ["nkeys", "passwords"])
async def test_credentials_over_an_unencrypted_connection(tmp_path: Path, credentials: str) -> None:
    """A false NATS server says that there is no TLS; a context with a tls:// address sends it nothing."""
    async with FalseNats.opened() as false:
        for scheme, is_told in (("tls", False), ("nats", True)):
            false.told, greeted = b"", false.greeted
            await connect(context_of(tmp_path / scheme, f"{scheme}://127.0.0.1:{false.port}", credentials))
            assert false.greeted > greeted
            assert (b"CONNECT" in false.told) is is_told
            if is_told:
                assert (b'"pass"' if credentials == "passwords" else b'"sig"') in false.told


def context_of(folder: Path, url: str, credentials: str) -> BusOptions:
    """The context that envbus generates for alice at this address."""
    tls = None
    if url.startswith("tls"):
        certificates.make(folder / "certs")
        tls = {"certificates": folder / "certs"}
    spec = access_of(trainers=["alice"], servers=["srv"], url=url, credentials=credentials, tls=tls)
    provision(spec, folder)
    return resolve_bus_options(context=str(folder / "contexts" / "alice.json"))


async def test_a_false_nats_server_with_another_certificate(tmp_path: Path) -> None:
    """TLS, but not with a certificate of the authority that the context names."""
    certificates.make(tmp_path / "other")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "other" / "server.pem", tmp_path / "other" / "server.key")
    async with FalseNats.opened(tls) as false:
        options = context_of(tmp_path / "site", f"tls://127.0.0.1:{false.port}", "nkeys")
        await connect(options)
        assert false.greeted > 0
        assert false.told == b""
        await connect(options.model_copy(update={"tls_ca_file": tmp_path / "other" / "ca.pem"}))
        assert b"CONNECT" in false.told


async def is_let_in(bus: AttackedBus, seed: str | None, **options: Any) -> bool:
    try:
        async with Wire.connect(bus.nats.port, seed=seed, **options):
            return True
    except (RefusedError, OSError):
        return False


async def test_somebody_without_the_seed(mode: str, shared_bus: AttackedBus) -> None:
    """Who names bob's public key must sign with his seed; no credentials at all are no better."""
    access = generated(mode)
    await shared_bus.use(access)
    own, bobs = new_seed(), access.public_key("bob")
    assert not await is_let_in(shared_bus, None)
    assert not await is_let_in(shared_bus, None, user="bob")
    assert not await is_let_in(shared_bus, own)
    assert not await is_let_in(shared_bus, own, nkey=bobs)
    await shared_bus.use(access.changed(lambda config: config.replace(bobs, public_key(own))))
    assert await is_let_in(shared_bus, own)


async def test_somebody_without_a_certificate(tmp_path: Path) -> None:
    """Credentials alone do not do where there are certificates."""
    url = f"tls://127.0.0.1:{free_port()}"
    alice = context_of(tmp_path, url, "nkeys")
    bare = alice.model_copy(update={"tls_cert_file": None, "tls_key_file": None})
    config = (tmp_path / "nats.conf").read_text()
    for is_checked, text in ((True, config), (False, config.replace("verify: true", "verify: false"))):
        async with EmbeddedNats(port=int(url.rpartition(":")[2]), config=text):
            assert await reaches(alice)
            assert await reaches(bare) is not is_checked


async def reaches(options: BusOptions) -> bool:
    connection = Connection(options, name="somebody")
    try:
        await connection.open(timeout_s=1)
        return True
    except BusError:
        return False
    finally:
        await connection.close()
