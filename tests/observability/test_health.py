"""/livez and /readyz through a server's life: loading, ready, draining, cut off."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing

import pytest
from processes import Processes
from small_env import SmallEnv, do
from web import Answer, get

from envbus import NATSEnvClient, NATSEnvServer
from envbus.bus.embedded import EmbeddedNats
from envbus.errors import UsageError

Serve = Callable[..., AbstractAsyncContextManager[NATSEnvServer]]
RUNS = re.compile(r"^envbus_server_in_flight\{.*\} 1\.0$", re.MULTILINE)
PROBED = {"metrics_host": "127.0.0.1"}


@pytest.fixture
def port() -> int:
    """A port that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answers(port: int, path: str, holds: Callable[[Answer], bool], *, timeout_s: float = 10) -> Answer:
    """Ask until the answer is as it should be."""
    answer = None
    async with asyncio.timeout(timeout_s):
        while answer is None or not holds(answer):
            try:
                answer = await get(port, path)
            except ConnectionError:
                await asyncio.sleep(0.02)
    return answer


async def test_not_ready_while_loading_then_ready(serve: Serve, port: int) -> None:
    environment = SmallEnv()
    environment.may_load.clear()
    async with serve(environment, metrics_port=port, **PROBED):
        await answers(port, "/readyz", lambda answer: answer.status == 503 and answer.body == "loading\n")
        assert (await get(port, "/livez")).status == 200
        environment.may_load.set()
        await answers(port, "/readyz", lambda answer: answer.status == 200)
        page = await get(port, "/metrics")
        assert "envbus_server_slots" in page.body


async def test_not_ready_while_draining(serve: Serve, nats_url: str, prefix: str, port: int) -> None:
    environment = SmallEnv()
    async with serve(environment, metrics_port=port, **PROBED) as server:
        async with NATSEnvClient(nats_url, "small-env", prefix=prefix) as client:
            await client.wait_for_server(timeout_s=40)
            call = asyncio.create_task(client.run_rollout(do("wait"), None, "m"))
            await answers(port, "/metrics", lambda answer: RUNS.search(answer.body) is not None)
            closing_server = asyncio.create_task(server.close())
            await answers(port, "/readyz", lambda answer: answer.body == "draining\n")
            assert (await get(port, "/livez")).status == 200
            environment.may_end.set()
            await call
        await closing_server
    with pytest.raises(ConnectionError):
        await get(port, "/livez")


async def test_not_ready_while_cut_off(serve: Serve, own_nats: EmbeddedNats, port: int) -> None:
    async with serve(address=own_nats.url, metrics_port=port, **PROBED):
        await answers(port, "/readyz", lambda answer: answer.status == 200)
        await own_nats.kill()
        await answers(port, "/readyz", lambda answer: answer.body == "cut off from NATS\n")
        assert (await get(port, "/livez")).status == 200
        await own_nats.restart()
        await answers(port, "/readyz", lambda answer: answer.status == 200)


async def test_alive_before_nats_is_there(serve: Serve, port: int) -> None:
    """An orchestrator must not restart a server because NATS comes later."""
    task: asyncio.Task[None]
    server = NATSEnvServer(
        "small-env", address="nats://127.0.0.1:1", environment=SmallEnv(), metrics_port=port, handle_signals=False
    )
    task = asyncio.create_task(server.run())
    await answers(port, "/livez", lambda answer: answer.status == 200)
    assert (await get(port, "/readyz")).body == "cut off from NATS\n"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_metrics_port_in_use_stops_the_server_with_a_word(nats_url: str, prefix: str) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = NATSEnvServer(
            "small-env", address=nats_url, prefix=prefix, environment=SmallEnv(), handle_signals=False,
            metrics_port=taken.getsockname()[1], **PROBED,
        )  # fmt: skip
        with pytest.raises(UsageError, match="choose another port"):
            await server.run()


async def test_a_controller_has_pages_of_the_whole_fleet(processes: Processes, port: int) -> None:
    """Ready while it runs; its own servers and those of others are on one page."""
    processes.serve("reverse-text", "--name", "by-hand")
    options = ("--replicas", "1", "--metrics-port", str(port))
    up, _ = processes.start("up", "reverse-text", *options, until="metrics of the fleet", stream="stdout")
    await answers(port, "/readyz", lambda answer: answer.status == 200)
    servers = re.compile(r'^envbus_server_state\{env="(?:by-hand|reverse-text)".*state="ready"\} 1\.0$', re.MULTILINE)
    page = await answers(port, "/metrics", lambda answer: len(servers.findall(answer.body)) == 2, timeout_s=60)
    assert 'envbus_controller_replicas{controller="' in page.body
    up.terminate()
    assert await asyncio.to_thread(up.wait, 15) == 0
