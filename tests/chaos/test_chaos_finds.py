"""What chaos runs found, each by itself: receipts that were lost, results that were forgotten."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chaos_ledger as ledger
import chaos_process
import pytest
from chaos_proxy import Link

from envbus import ClientSettings, NATSEnvClient, NATSEnvServer
from envbus.bus.embedded import EmbeddedNats
from envbus.errors import LateRequestError
from envbus.server.reception import Reception


class EchoEnv:
    requires_group_rollouts = False

    async def run_rollout(self, input: Any, client: Any, model: str, *args: Any, **kwargs: Any) -> Any:
        return {"example_id": input["example_id"], "reward": 1.0, "blob": blob(input["bytes"])}

    async def run_group(self, group_inputs: list[Any], client: Any, model: str, *args: Any, **kwargs: Any) -> Any:
        return [await self.run_rollout(item, client, model) for item in group_inputs]

    def eval_examples(self) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


def blob(size_bytes: int) -> bytes:
    return random.Random(size_bytes).randbytes(size_bytes)


async def becomes(condition: Callable[[], bool], *, timeout_s: float = 40.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what changes it sets no event
            await asyncio.sleep(0.02)


async def until_ready(server: NATSEnvServer) -> Reception:
    await becomes(lambda: hasattr(server, "_desks") and server._desks.reception.state == "ready")
    return server._desks.reception


@dataclass
class Site:
    """A server in this process and a client, each behind a link of its own."""

    server_link: Link
    client_link: Link
    reception: Reception
    client: NATSEnvClient


@asynccontextmanager
async def open_site(session_nats: EmbeddedNats, prefix: str) -> AsyncIterator[Site]:
    links = [Link(lambda: session_nats.port) for _ in range(2)]
    for link in links:
        await link.open()
    server = NATSEnvServer("echo", address=links[0].url, prefix=prefix, environment=EchoEnv())
    serving = asyncio.create_task(server.run())
    try:
        reception = await until_ready(server)
        settings = ClientSettings(check_interval_s=0.3)
        async with NATSEnvClient(links[1].url, "echo", prefix=prefix, settings=settings) as client:
            yield Site(*links, reception, client)
    finally:
        await server.close()
        await serving
        for link in links:
            await link.close()


@pytest.mark.parametrize("lost_on", ["client_link", "server_link"])
async def test_a_lost_receipt_is_repeated(session_nats: EmbeddedNats, prefix: str, lost_on: str) -> None:
    """Else the server holds the result until its time is over (P33)."""
    async with open_site(session_nats, prefix) as site:
        await lose_a_receipt(site, lost_on)


async def lose_a_receipt(site: Site, lost_on: str) -> None:
    link: Link = getattr(site, lost_on)
    for _ in range(20):
        await site.client.run_rollout(item(bytes=0), None, "m")
        link.half_open = True  # in most cases within the moment in which receipts are gathered
        swallowed_bytes = link.swallowed_bytes
        if site.reception.jobs.held_count == 1:
            break
        link.restore()
    await becomes(lambda: link.swallowed_bytes > swallowed_bytes)
    assert site.reception.jobs.held_count == 1
    link.restore()
    await becomes(lambda: site.reception.jobs.held_count == 0)
    session = site.client._session
    assert session is not None
    await becomes(lambda: len(session._receipts) == 0)


async def test_a_job_whose_result_is_forgotten_while_it_is_fetched_runs_again(
    session_nats: EmbeddedNats, prefix: str
) -> None:
    """As when the server took the client for gone: with attempts left there is no ResultLostError (P12)."""
    async with open_site(session_nats, prefix) as site:
        await forget_a_result(site)


async def forget_a_result(site: Site) -> None:
    site.client_link.bytes_per_s = 300_000
    calling = asyncio.create_task(site.client.run_rollout(item(bytes=3_000_000), None, "m"))
    jobs = site.reception.jobs
    await becomes(lambda: jobs.held_count == 1)
    jobs.release(list(jobs._jobs), site.client._client_id)
    await becomes(lambda: jobs.held_count == 1)
    site.client_link.restore()
    output: Any = await calling
    assert output["blob"] == blob(3_000_000)
    await becomes(lambda: jobs.held_count == 0)


def item(**fields: Any) -> Any:
    return {"prompt": [], "example_id": 1} | fields


async def test_a_server_with_a_wrong_clock_costs_no_call(nats_url: str, prefix: str, tmp_path: Path) -> None:
    """It refuses everything as late, so it always has room: it must not be where all jobs go to end."""
    wrong, right = (server_process(name, nats_url, prefix, tmp_path) for name in ("wrong", "right"))
    settings = ClientSettings(accept_timeout_s=1.0, wait_repeat_s=0.3, start_window_s=30, no_server_timeout_s=60)
    try:
        wrong.start()
        async with NATSEnvClient(nats_url, name="chaos", prefix=prefix, settings=settings) as client:
            await client.run_rollout(call("first"), None, "m")
            await set_clock_wrong(wrong, tmp_path)
            right.start()
            outputs: list[Any] = await asyncio.gather(
                *(client.run_rollout(call(f"n{n}"), None, "m") for n in range(20))
            )
            assert [output["answer"]["key"] for output in outputs] == [f"n{n}" for n in range(20)]
    finally:
        wrong.reap()
        right.reap()


async def test_a_client_with_a_wrong_clock_is_told(nats_url: str, prefix: str, tmp_path: Path) -> None:
    """Where no server's clock is like its own, the call ends with what to look at."""
    only = server_process("only", nats_url, prefix, tmp_path)
    settings = ClientSettings(wait_repeat_s=0.3, start_window_s=1.0, no_server_timeout_s=60)
    try:
        only.start()
        async with NATSEnvClient(nats_url, name="chaos", prefix=prefix, settings=settings) as client:
            await client.wait_for_server(timeout_s=60)
            await set_clock_wrong(only, tmp_path)
            with pytest.raises(LateRequestError, match="clocks of the two hosts differ"):
                await asyncio.wait_for(client.run_rollout(call("late"), None, "m"), 60)
    finally:
        only.reap()


async def set_clock_wrong(process: chaos_process.Process, folder: Path) -> None:
    """Have the process's clock wrong by an hour, and wait until it is."""
    process.order("clock", amount=3600.0, for_s=600.0)
    process.order("vitals", tag="clock is wrong")
    await becomes(lambda: any(entry["tag"] == "clock is wrong" for entry in ledger.read(folder, ledger.VITALS)))


def server_process(name: str, url: str, prefix: str, folder: Path) -> chaos_process.Process:
    link = Link(lambda: 0)
    link.port = int(url.rpartition(":")[2])  # no link: NATS itself
    return chaos_process.server(name, folder=folder, link=link, prefix=prefix, slots=4, variables={})


def call(key: str) -> Any:
    return {"prompt": [{"role": "user", "content": ""}], "example_id": key, "key": key, "do": "sleep", "for_s": 0.05}
