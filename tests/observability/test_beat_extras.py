"""Heartbeats say which rollouts ended, what failed and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import nats
from small_env import SmallEnv, do

from envbus import NATSEnvClient, NATSEnvServer, ServerSettings
from envbus.bus.messages import Beat, parse_as
from envbus.bus.subjects import all_beats

QUICK = ServerSettings(beat_interval_s=0.1)
Serve = Callable[..., AbstractAsyncContextManager[NATSEnvServer]]


async def beats_until(url: str, prefix: str, holds: Callable[[list[Beat]], bool]) -> list[Beat]:
    """Every beat that came until the condition held."""
    heard: list[Beat] = []
    connection = await nats.connect(url)
    try:
        subscription = await connection.subscribe(all_beats(prefix))
        while not heard or not holds(heard):
            heard.append(parse_as((await subscription.next_msg(timeout=30)).data, Beat))
    finally:
        await connection.close()
    return heard


async def test_ended_rollouts_are_told_once_with_their_client(serve: Serve, nats_url: str, prefix: str) -> None:
    listening = asyncio.create_task(
        beats_until(nats_url, prefix, lambda beats: sum(len(beat.recent) for beat in beats) == 3)
    )
    async with serve(settings=QUICK), NATSEnvClient(nats_url, "small-env", prefix=prefix) as client:
        await client.wait_for_server(timeout_s=40)
        await client.run_rollout(do("ok", "one", reward=0.25), None, "m")
        await client.run_rollout(do("raise", "two"), None, "m")
        await client.run_group([do("ok", "three", took_s=100.0)], None, "m")
        beats = await listening
    told = {rollout.example_id: rollout for beat in beats for rollout in beat.recent}
    assert told["one"].reward == 0.25
    assert told["two"].error == "ValueError"
    assert told["two"].reward is None
    assert told["three"].duration_s == 100.0
    assert {len(rollout.client) for rollout in told.values()} == {8}
    last = beats[-1]
    assert last.failed_by_type == {"ValueError": 1}
    assert (last.done, last.failed, last.jobs, sum(last.duration_counts)) == (2, 1, 3, 3)
    assert last.received_bytes > 0
    assert last.sent_bytes > 0


async def test_a_refused_call_counts_as_a_failure_of_its_type(serve: Serve, nats_url: str, prefix: str) -> None:
    environment: Any = SmallEnv()
    environment.requires_group_rollouts = True
    async with serve(environment, settings=QUICK):
        await beats_until(nats_url, prefix, lambda beats: beats[-1].state == "ready")
        connection = await nats.connect(nats_url)
        await connection.request(f"{prefix}.small-env.rollout", b"\x81\xa5input\x80", timeout=20)
        await connection.close()
        beats = await beats_until(nats_url, prefix, lambda beats: beats[-1].failed > 0)
    assert sum(beats[-1].failed_by_type.values()) == 1


async def test_waiting_clients_are_named_with_their_jobs(serve: Serve, nats_url: str, prefix: str) -> None:
    environment = SmallEnv()
    server = serve(environment, settings=QUICK, max_concurrent=1)
    async with server, NATSEnvClient(nats_url, "small-env", prefix=prefix) as client:
        await client.wait_for_server(timeout_s=40)
        calls = [asyncio.create_task(client.run_rollout(do("wait"), None, "m")) for _ in range(4)]
        beats = await beats_until(nats_url, prefix, lambda beats: beats[-1].waiting_jobs == 3)
        assert list(beats[-1].waiting_by_client.values()) == [3]
        assert [len(name) for name in beats[-1].waiting_by_client] == [8]
        environment.may_end.set()
        await asyncio.gather(*calls)
