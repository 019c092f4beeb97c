"""Servers as NATS micro services: what a stock client of that protocol finds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import nats
import pytest
from nats.micro.service import NAME_REGEX, SEMVER_REGEX, ServiceInfo, ServicePing, ServiceStats
from small_env import do

from envbus import NATSEnvClient, NATSEnvServer
from envbus.server.microservice import semantic_version, service_name

Serve = Callable[..., AbstractAsyncContextManager[NATSEnvServer]]
ODD_NAME = "owner/my env.v1@1.2 é"


@pytest.fixture
async def asker(nats_url: str) -> AsyncIterator[Any]:
    connection = await nats.connect(nats_url)
    with contextlib.suppress(nats.errors.NoRespondersError):
        await connection.request("nobody", b"")  # starts the task that takes replies, which lives as long as this
    yield connection
    await connection.close()


@pytest.fixture
async def client(nats_url: str, prefix: str) -> AsyncIterator[NATSEnvClient]:
    async with NATSEnvClient(nats_url, name="micro-env", prefix=prefix) as client:
        yield client


async def ask(asker: Any, subject: str) -> Any:
    return json.loads((await asker.request(subject, b"", timeout=20)).data)


async def test_stats_count_what_was_asked(serve: Serve, asker: Any, client: NATSEnvClient, prefix: str) -> None:
    async with serve(name="micro-env") as server:
        await client.wait_for_server(timeout_s=40)
        for what in ("ok", "ok", "raise"):
            await client.run_rollout(do(what, took_s=0.5), None, "m")
        answer = await ask(asker, f"$SRV.STATS.micro-env.{server.server_id}")
    stats = ServiceStats.from_dict(answer)
    assert answer["type"] == stats.type
    work, info, examples = stats.endpoints
    assert (work.name, work.subject, work.queue_group) == ("rollout", f"{prefix}.micro-env.rollout", "workers")
    assert (work.num_requests, work.num_errors, work.last_error) == (3, 1, "ValueError")
    assert work.processing_time >= 1_000_000_000
    assert work.average_processing_time == work.processing_time // 3
    assert work.data == {"state": "ready", "slots": 64, "in_flight": 0, "waiting_jobs": 0}
    assert info.num_requests >= 1
    assert examples.num_requests == 0


async def test_all_three_forms_answer_and_have_the_shape_of_the_protocol(serve: Serve, asker: Any) -> None:
    readers: dict[str, Any] = {"PING": ServicePing, "INFO": ServiceInfo, "STATS": ServiceStats}
    async with serve(name="micro-env") as server:
        own = f"micro-env.{server.server_id}"
        await answering(asker, own)
        for verb, reader in readers.items():
            for subject in (f"$SRV.{verb}.micro-env", f"$SRV.{verb}.{own}"):
                answer = await ask(asker, subject)
                told = reader.from_dict(answer)
                assert (told.id, told.name) == (server.server_id, "micro-env")
                assert answer["type"] == reader.from_dict(answer).type
                assert set(reader.from_dict(answer).to_dict()) == set(answer)
                assert SEMVER_REGEX.match(told.version)
                assert NAME_REGEX.match(told.name)
                assert all(isinstance(value, str) for value in told.metadata.values())


async def test_every_server_answers_a_ping_to_all(serve: Serve, asker: Any) -> None:
    """As ``nats micro ls`` asks: one inbox, many replies."""
    async with serve(name="micro-env") as one, serve(name=ODD_NAME) as other:
        for server, name in ((one, "micro-env"), (other, service_name(ODD_NAME))):
            await answering(asker, f"{name}.{server.server_id}")
        inbox = asker.new_inbox()
        replies = await asker.subscribe(inbox)  # no callback, so no task
        await asker.publish("$SRV.PING", b"", reply=inbox)
        found: dict[str, Any] = {}
        async with asyncio.timeout(20):
            while not {one.server_id, other.server_id} <= set(found):
                told = json.loads((await replies.next_msg(timeout=20)).data)
                found[told["id"]] = told
        assert found[other.server_id]["metadata"]["env"] == ODD_NAME


async def test_a_stopped_server_answers_no_more(serve: Serve, asker: Any) -> None:
    async with serve(name="micro-env") as server:
        own = f"micro-env.{server.server_id}"
        await answering(asker, own)
    with pytest.raises(nats.errors.NoRespondersError):
        await ask(asker, f"$SRV.PING.{own}")


async def answering(asker: Any, name: str) -> None:
    """Wait until a server has come up."""
    async with asyncio.timeout(30):
        while True:
            try:
                await ask(asker, f"$SRV.PING.{name}")
                return
            except nats.errors.NoRespondersError:
                await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.2.3", "1.2.3"), ("1.2", "1.2.0"), ("2024.05.01", "2024.5.1"), ("0.1.0rc1.dev4+abc", "0.1.0"), ("?", "0.0.0")],
)
def test_versions_are_made_semantic(version: str, expected: str) -> None:
    assert semantic_version(version) == expected
    assert SEMVER_REGEX.match(expected)


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k~0a1b2c3d", ODD_NAME, "\ud800", "a b"])
def test_names_are_made_usable(name: str) -> None:
    assert NAME_REGEX.match(service_name(name))
    assert re.sub(r"\W", "", name, flags=re.ASCII) == re.sub(r"\W|-", "", service_name(name), flags=re.ASCII)
