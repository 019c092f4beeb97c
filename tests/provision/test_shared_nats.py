"""Who gets onto a provisioned NATS server: with a certificate and credentials, by the ways that its role has."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import SecretStr
from shared_nats import Share, SharedNats
from tcp_server import free_port

from envbus import ClientSettings, NATSEnvClient
from envbus.bus.address import BusOptions
from envbus.errors import BusAuthError, BusError

pytestmark = pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")


async def refusal(options: BusOptions, *, within_s: float = 10) -> BusError:
    """The error of who may not connect. Refused credentials are told at once, all else when the time is over."""
    with pytest.raises(BusError) as caught:
        await NATSEnvClient(options, "any", settings=ClientSettings(connect_timeout_s=within_s)).connect()
    return caught.value


async def reaches(options: BusOptions) -> None:
    async with NATSEnvClient(options, "any", settings=ClientSettings(connect_timeout_s=10)):
        pass


@pytest.mark.parametrize(("credentials", "handshake_first"), [("nkeys", False), ("passwords", True)])
async def test_users_connect_and_nobody_else(
    share: Share, caplog: pytest.LogCaptureFixture, credentials: str, handshake_first: bool
) -> None:
    async with share(credentials=credentials, handshake_first=handshake_first) as shared:
        alice = shared.options("alice")
        await reaches(alice)
        nobody = {"user": None, "password": None, "context_file": None, "nkey_seed_file": None}
        assert isinstance(await refusal(alice.model_copy(update=nobody)), BusAuthError)
        if handshake_first:
            clear = BusOptions(servers=(alice.servers[0].replace("tls://", "nats://"),))
            assert "tls_first" in str(await refusal(clear, within_s=0.1))
        else:
            bare = alice.model_copy(update={"tls_cert_file": None, "tls_key_file": None})
            assert "may want a certificate of this user" in str(await refusal(bare, within_s=2))
            foreign = alice.model_copy(update={"tls_ca_file": None})
            assert "the certificate of NATS is not accepted" in str(await refusal(foreign, within_s=2))
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


async def test_only_dashboards_come_by_websocket(share: Share) -> None:
    port = free_port()
    async with share(accounts=True, listen={"websocket_port": port}, user={"bob": {"websocket": True}}) as shared:
        for user in ("wall", "bob"):
            await reaches(by_websocket(shared, user, port))
        assert isinstance(await refusal(by_websocket(shared, "alice", port)), BusAuthError)
        await reaches(shared.options("wall"))


def by_websocket(shared: SharedNats, user: str, port: int) -> BusOptions:
    """The browser's way: no certificate of its own."""
    update = {"servers": (f"wss://127.0.0.1:{port}",), "tls_cert_file": None, "tls_key_file": None}
    return shared.options(user).model_copy(update=update)


async def test_limits_and_monitoring_are_as_the_file_says(share: Share) -> None:
    port = free_port()
    limits = {"max_payload_bytes": 200_000, "max_connections": 77, "max_subscriptions": 60}
    limits |= {"max_pending_bytes": 9_000_000, "write_deadline_s": 7}
    async with share(tls=False, listen={"monitoring_port": port}, limits=limits) as shared:
        found = await monitored(port)
        names = {"max_payload": 200_000, "max_connections": 77, "max_subscriptions": 60, "max_pending": 9_000_000}
        names |= {"write_deadline": 7_000_000_000, "max_control_line": 2048, "ping_interval": 20_000_000_000}
        assert {name: found[name] for name in names} == names
        assert found["http_host"] == "127.0.0.1"
        async with shared.connected("alice") as wire:
            assert wire.client.max_payload == 200_000


async def monitored(port: int) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /varz HTTP/1.0\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


async def test_a_trainer_with_an_account_cannot_use_up_the_connections(share: Share) -> None:
    async with share(tls=False, accounts=True, limits={"trainer_connections": 1}) as shared, shared.connected("alice"):
        assert "maximum account active connections" in str(await refusal(shared.options("alice"), within_s=1))
        async with shared.connected("bob"):
            pass


@pytest.mark.parametrize("accounts", [False, True])
async def test_rotating_by_reload_touches_one_user_only(share: Share, accounts: bool) -> None:
    """The old nkey is refused, the new one taken, everybody else stays connected."""
    async with share(tls=False, accounts=accounts) as shared, shared.connected("bob") as bob:
        alice = shared.options("alice")
        seed = SecretStr((shared.folder / "users" / "alice.nk").read_text())
        async with shared.connected("alice") as wire:
            await shared.reload(rotate=["alice"])
            await asyncio.wait_for(wire.closed.wait(), 10)
        assert await bob.judged() == []
        old = alice.model_copy(update={"nkey_seed_file": None, "nkey_seed": seed})
        assert isinstance(await refusal(old), BusAuthError)
        await reaches(shared.options("alice"))
