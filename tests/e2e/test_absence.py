"""No server, loading, just stopped, and no NATS at all: each says what it is, in bounded time."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator

import pytest
from stage import CLIENT_SETTINGS, READY_S, Stage, becomes, do, run, settled
from tcp_server import tcp_server

from envbus import ClientSettings, NATSEnvClient
from envbus.bus.embedded import EmbeddedNats
from envbus.errors import (
    BusClosedError,
    BusError,
    BusPermissionError,
    BusUnreachableError,
    EnvironmentCrashedError,
    NoServerError,
    ServerLoadingError,
    UsageError,
)

HASTY = {"no_server_timeout_s": 0.3, "loading_timeout_s": 0.5}


async def test_no_server_at_all(stage: Stage) -> None:
    """P59: says env, address and what to do."""
    async with stage.client(settings=HASTY) as client:
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(run(client, do()), client.wait_for_server(), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NoServerError] * 2
        assert re.search(r"'stage'.*127\.0\.0\.1.*envbus serve", str(outcomes[0]))
        assert "'stage'" in str(outcomes[1])
        assert not await client.health()
        await settled(client)


async def test_a_typo_names_the_envs_that_are_there(shared: Stage) -> None:
    """P59: with a suggestion."""
    await shared.ready()
    async with (
        shared.client(name="stagw", settings=HASTY) as near,
        shared.client(name="quite-another", settings=HASTY) as far,
    ):
        outcomes = await asyncio.gather(run(near, do()), near.wait_for_server(), run(far, do()), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [NoServerError] * 3
        called, waited, other = map(str, outcomes)
        assert "the envs there are: stage; did you mean 'stage'" in called
        assert "did you mean 'stage'" in waited
        assert other.endswith("the envs there are: stage")


async def test_a_loading_server_is_waited_for_to_a_stated_bound(stage: Stage) -> None:
    """P59: longer than the bound for no server; over its own bound the error says loading."""
    stage.launch(env_args={"load_s": 3})
    await stage.event("loading", timeout_s=READY_S)
    async with stage.client(settings=HASTY) as hasty, stage.client(settings={"no_server_timeout_s": 0.3}) as patient:
        waiting = asyncio.create_task(run(patient, do()))
        outcomes = await asyncio.gather(
            run(hasty, do()), hasty.wait_for_server(), hasty.examples(), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ServerLoadingError] * 3
        assert re.search(r"'stage'.*loading after 0\.5 s", str(outcomes[0]))
        assert "still loading" in str(outcomes[1])
        assert not await hasty.health()
        assert (await waiting)["reward"] == 1.0


async def test_a_restart_is_bridged(stage: Stage) -> None:
    """P59: the only server stopped a second ago, the next is on its way."""
    stage.launch()
    async with stage.client(settings={"no_server_timeout_s": 60.0}) as client:
        await client.wait_for_server(timeout_s=READY_S)
        stage.servers[0].kill()
        waiting = asyncio.create_task(run(client, do()))
        successor = stage.launch()
        assert (await asyncio.wait_for(waiting, READY_S))["pid"] == successor.pid
        await settled(client)


async def test_an_env_that_fails_to_load_is_told_with_its_reason(stage: Stage) -> None:
    """P17: exit code 1 with the reason in the log; a client that listens at that time is told too."""
    async with stage.client(settings={"no_server_timeout_s": 5.0}) as client:
        await client.connect()
        async with stage.beats() as beats:
            server = stage.launch(env_args={"no_such_argument": 1})
            failed = await beats.until(lambda now: now[0].state == "failed", timeout_s=READY_S)
            assert failed[0].error is not None
            assert "no_such_argument" in failed[0].error
        assert await server.exit_code() == 1
        assert "no_such_argument" in server.log
        with pytest.raises((EnvironmentCrashedError, NoServerError)):
            await client.wait_for_server(timeout_s=0.3)


async def test_those_who_wait_hear_at_once_that_the_env_cannot_be_loaded(stage: Stage) -> None:
    """P17: waiting for a server, and with a job in line; not after the time for servers to appear."""
    async with stage.client(settings={"no_server_timeout_s": 90.0}) as client, stage.beats() as beats:
        await client.connect()
        waits = [asyncio.create_task(client.wait_for_server()), asyncio.create_task(run(client, do()))]
        await becomes(lambda: client._session is not None and client._session._patience._watching)
        server = stage.launch(env_args={"no_such_argument": 1})
        await beats.until(lambda now: now[0].state == "failed", timeout_s=READY_S)
        await server.exit_code()
        ended = time.monotonic()
        for wait in waits:
            with pytest.raises(EnvironmentCrashedError, match="no_such_argument"):
                await asyncio.wait_for(wait, 40)
        assert time.monotonic() - ended < 30
        await settled(client)


async def unreachable(address: str) -> tuple[BaseException, float]:
    """Return the error of connecting and how long it took."""
    settings = ClientSettings(**CLIENT_SETTINGS | {"connect_timeout_s": 1.0})
    client = NATSEnvClient(address, "stage-env", settings=settings)
    before = time.monotonic()
    try:
        with pytest.raises(BusError) as caught:
            await client.connect()
        took_s = time.monotonic() - before
    finally:
        await client.close()
    return caught.value, took_s


async def test_a_closed_port() -> None:
    """P58."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error, took_s = await unreachable(f"nats://127.0.0.1:{port}")
    assert isinstance(error, BusUnreachableError)
    assert f"127.0.0.1:{port}: connection refused, no NATS server listens there" in str(error)
    assert took_s < 20


async def test_a_call_without_a_connection_fails_with_the_same_error() -> None:
    """P58, P11."""
    async with asyncio.timeout(30):
        client = NATSEnvClient("nats://127.0.0.1:1", "stage-env", settings=ClientSettings(connect_timeout_s=0.5))
        for _ in range(2):
            with pytest.raises(BusUnreachableError, match=r"127\.0\.0\.1:1: connection refused"):
                await run(client, do())
        await client.close()


async def test_closing_ends_a_call_that_still_connects() -> None:
    """P11: with an error; the caller was not cancelled, so it must not look as if it had been."""
    client = NATSEnvClient("nats://127.0.0.1:1", "stage-env")
    call = asyncio.create_task(run(client, do()))
    await becomes(lambda: client._bus is not None and client._bus._opening is not None)
    await client.close()
    with pytest.raises(BusClosedError):
        await asyncio.wait_for(call, 20)


async def test_a_client_taken_through_a_fork_says_so(shared: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: its thread stayed in the parent, so a call would wait for ever."""
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)
            with pytest.raises(UsageError, match="one in each process"):
                await asyncio.wait_for(run(client, do()), 20)
        assert (await run(client, do()))["reward"] == 1.0


async def test_a_denied_env_is_told_instead_of_waited_for() -> None:
    """P53, P59: NATS tells of a denial only on the side; the call must end all the same."""
    denied = '{user: a, password: b, permissions: {publish: {deny: ["env.>"]}}}'
    async with EmbeddedNats(config=f"authorization: {{users: [{denied}]}}") as nats:
        address = nats.url.replace("://", "://a:b@")
        async with NATSEnvClient(address, "stage-env", settings=ClientSettings(**CLIENT_SETTINGS)) as client:
            with pytest.raises(BusPermissionError, match=r"env\.stage-env\.(rollout|wait)"):
                await asyncio.wait_for(run(client, do()), 30)
            await settled(client)


async def test_a_host_that_does_not_resolve() -> None:
    """P58."""
    error, took_s = await unreachable("nats://no-such-host.invalid:4222")
    assert isinstance(error, BusUnreachableError)
    assert "does not resolve" in str(error)
    assert took_s < 20


@pytest.fixture
async def http_port() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with tcp_server(answer) as port:
        yield port


async def test_an_http_server_is_named_as_not_nats(http_port: int) -> None:
    """P58."""
    error, took_s = await unreachable(f"nats://127.0.0.1:{http_port}")
    assert isinstance(error, BusUnreachableError)
    assert f"127.0.0.1:{http_port}: something answers there, but it is not NATS" in str(error)
    assert took_s < 20
