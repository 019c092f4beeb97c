"""Misbehaving endpoints behind a server process: what the caller gets, and that the slot is free again."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp import web
from bad_endpoint import BadEndpoint, MakeEndpoint, answer, completion, error, hang
from served import ITEM, READY_S, client_of, serving

from envbus import NATSEnvClient
from envbus.bus.embedded import EmbeddedNats
from envbus.error_chain import error_matches
from envbus.errors import ModelError
from envbus.types import ClientConfig


@pytest.fixture(scope="module")
def place(session_nats: EmbeddedNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and prefix of a server with one slot, which may use no key."""
    prefix = f"t{secrets.token_hex(4)}"
    folder = tmp_path_factory.mktemp("served")
    with serving(
        session_nats.url, prefix, folder, options=["--max-concurrent", "1", "--allow-url", "http://127.0.0.1:*"]
    ):
        yield session_nats.url, prefix


@pytest.fixture
async def env(place: tuple[str, str]) -> AsyncIterator[NATSEnvClient]:
    async with client_of(*place) as client:
        await client.wait_for_server(timeout_s=READY_S)
        yield client


async def test_each_rollout_ends_with_its_kind_of_error_and_the_slot_is_free(
    env: NATSEnvClient, make_endpoint: MakeEndpoint
) -> None:
    """P51: one slot, and endpoints that refuse, are always busy, hang, and fail twice."""
    dead, busy, hanging, shaky = (make_endpoint() for _ in range(4))
    dead.close()
    busy.will(error(429, "no room today", Retry_After_Ms="20"))
    hanging.will(hang)
    shaky.will(error(500), error(500), answer(completion("<reversed_text>cba</reversed_text>")))
    configs = [
        dead.config(max_retries=1),
        busy.config(max_retries=3),
        hanging.config(timeout=0.5),
        shaky.config(),
    ]
    async with asyncio.timeout(60):
        outputs = await asyncio.gather(*(env.run_rollout(ITEM, config, "m") for config in configs))
    told = [failure(output) for output in outputs[:3]]
    assert [kind for kind, _ in told] == ["ModelUnreachableError", "ModelRateLimitError", "ModelTimeoutError"]
    assert f"{dead.url} could not be reached after 2 tries in " in told[0][1]
    assert "Connect" in told[0][1], "the cause is in the chain"
    assert "answered 429 after 4 tries in " in told[1][1]
    assert "no room today" in told[1][1]
    assert "timeout = 0.5 s" in told[2][1]
    assert outputs[3]["error"] is None
    assert outputs[3]["reward"] == 1.0
    assert len(shaky.requests) == 3

    shaky.will(answer())
    async with asyncio.timeout(60):
        assert (await env.run_rollout(ITEM, shaky.config(), "m"))["error"] is None
        while any(beat.in_flight for beat in await env.servers()):
            pass


def failure(output: Any) -> tuple[str, str]:
    """The kind of an output's error and its text."""
    assert output["reward"] is None
    assert output["error"]["retryable"]
    assert error_matches(output["error"], ModelError), "rules for the base class hold"
    return output["error"]["error"], output["error"]["error_chain_repr"]


async def test_a_group_whose_endpoint_dies(env: NATSEnvClient, endpoint: BadEndpoint) -> None:
    """P02: it answers twice and then refuses; the two that failed are in no average and counted by type."""

    async def die(request: web.Request) -> web.StreamResponse:
        endpoint.stop_soon()
        return await hang(request)

    right = answer(completion("<reversed_text>cba</reversed_text>"))
    endpoint.will(right, right, die)
    config = endpoint.config(max_retries=0)
    outputs = await env.run_group([ITEM] * 4, config, "m")
    assert sorted(str(output["reward"]) for output in outputs) == ["1.0", "1.0", "None", "None"]
    failed = [output for output in outputs if output.get("error") is not None]
    assert {failure(output)[0] for output in failed} == {"ModelUnreachableError"}
    assert [output["advantage"] for output in outputs if output.get("error") is None] == [0.0, 0.0]

    metadata = (await env.evaluate(config, "m", num_examples=1, rollouts_per_example=3))["metadata"]
    assert metadata["num_failed"] == 3
    assert metadata["errors_by_type"] == {"ModelUnreachableError": 3}
    assert metadata["avg_reward"] is None


async def test_a_key_that_only_the_client_has(
    env: NATSEnvClient, endpoint: BadEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47: before any request; the error names variable, server and host, and the key went nowhere."""
    monkeypatch.setenv("MY_LLM_KEY", "secret-of-the-client")
    (beat,) = await env.servers()
    output = await env.run_rollout(ITEM, endpoint.config(api_key_var="MY_LLM_KEY"), "m")
    assert output["error"] is not None
    assert output["error"]["error"] == "ModelKeyError"
    assert not output["error"]["retryable"]
    for named in ("MY_LLM_KEY", beat.server, socket.gethostname()):
        assert named in output["error"]["error_chain_repr"]
    assert endpoint.requests == []
    assert "secret" not in str(output)


async def test_an_evaluation_loses_nothing_to_a_dead_endpoint(env: NATSEnvClient, make_endpoint: MakeEndpoint) -> None:
    """Of three endpoints the dead one's examples go to the others."""
    endpoints = [make_endpoint() for _ in range(3)]
    config = ClientConfig(endpoint_configs=tuple(each.endpoint() for each in endpoints))
    endpoints[1].close()
    async with asyncio.timeout(60):
        results = await env.evaluate(config, "m", num_examples=6, rollouts_per_example=2)
    assert results["metadata"]["num_failed"] == 0
    assert sum(len(each.requests) for each in endpoints) == 12
