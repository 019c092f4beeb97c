"""Env ids with characters that NATS or paths give a meaning: each is reachable under exactly its own name."""

from __future__ import annotations

import asyncio

import pytest
from stage import READY_S, SERVER_SETTINGS, Stage, do, run
from stage_env import StageEnv

from envbus import NATSEnvClient, NATSEnvServer, ServerSettings
from envbus.errors import NoServerError, UsageError

NAMES = [
    "owner/my-env",
    "owner/my-env@1.2.0",
    "owner/my_env",
    "math.v1.2",
    "my env",
    "MATH",
    "math",
    "é",
    "a/b",
    "a--b",
    "a%2Fb",
    "a*b",
    ">",
    "$SYS",
]


async def test_every_name_is_its_own(nats_url: str, prefix: str, tmp_path: object) -> None:
    """P56: 14 servers in one process, each called by the id that it was given and by no other's."""
    servers = [
        NATSEnvServer(
            name,
            address=nats_url,
            prefix=prefix,
            environment=StageEnv("/dev/null", groups=False, teardown_s=0, tag=name),
            settings=ServerSettings(**SERVER_SETTINGS),
            handle_signals=False,
        )
        for name in NAMES
    ]
    serving = [asyncio.create_task(server.run()) for server in servers]
    clients = [NATSEnvClient(nats_url, name, prefix=prefix) for name in NAMES]
    try:
        for name, client in zip(NAMES, clients, strict=True):
            info = await client.wait_for_server(timeout_s=READY_S)
            assert (info.env, info.env_id) == (name, name)
            assert [(await run(client, do()))["tag"] for _ in range(2)] == [name] * 2
        assert {beat.env for beat in await clients[0].servers()} == {NAMES[0]}
    finally:
        for client in clients:
            await client.close()
        await asyncio.gather(*(server.close() for server in servers))
        await asyncio.gather(*serving)


async def test_a_server_of_this_process_is_gone_after_its_close(nats_url: str, prefix: str) -> None:
    """P59: though its connection stays for the client, nothing of it answers any more."""
    server = NATSEnvServer(
        "here",
        address=nats_url,
        prefix=prefix,
        environment=StageEnv("/dev/null", groups=False, teardown_s=0, tag=""),
        handle_signals=False,
    )
    serving = asyncio.create_task(server.run())
    async with NATSEnvClient(nats_url, "here", prefix=prefix) as client:
        await client.wait_for_server(timeout_s=READY_S)
        await server.close()
        await serving
        with pytest.raises(NoServerError):
            await client.info()
        assert not await client.health()
        with pytest.raises(NoServerError):
            await client.wait_for_server(timeout_s=0.1)


@pytest.mark.parametrize("name", ["", "x" * 200])
def test_a_name_that_makes_no_subject_is_refused(name: str) -> None:
    """P56."""
    with pytest.raises(UsageError):
        NATSEnvClient("nats://127.0.0.1:1", name)


async def test_the_tilde_is_kept_for_the_digest_of_arguments(stage: Stage) -> None:
    """P35, P56: no env id can pass itself off as another's configuration."""
    with pytest.raises(UsageError, match="~"):
        NATSEnvClient(stage.url, "stage-env~01234567")


async def test_a_server_that_waits_for_nats_can_be_closed() -> None:
    """P11, P58: close() ends the wait, too."""
    server = NATSEnvServer(
        "here",
        address="nats://127.0.0.1:1",
        environment=StageEnv("/dev/null", groups=False, teardown_s=0, tag=""),
        handle_signals=False,
    )
    serving = asyncio.create_task(server.run())
    await asyncio.sleep(0.1)
    async with asyncio.timeout(30):
        await server.close()
        await serving
