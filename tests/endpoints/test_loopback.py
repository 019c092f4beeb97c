"""P49: a loopback URL means the host of who wrote it; a server on another one says so instead of calling its own."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest
from bad_endpoint import BadEndpoint, answer, completion
from served import ITEM, READY_S, client_of, serving

from envbus.bus.calls import Call, call_map, read_call
from envbus.bus.loopback import is_loopback, loopback_id
from envbus.environments.model_call import chat
from envbus.errors import ModelAddressError
from envbus.model_urls import LOOPBACK_PATTERNS
from envbus.server.model_endpoints import KeyPolicy, ModelEndpoints
from envbus.types import ClientConfig, EndpointConfig

PROMPT = [{"role": "user", "content": "hi"}]
RIGHT = answer(completion("<reversed_text>cba</reversed_text>"))


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("http://localhost:8000/v1", True),
        ("http://LOCALHOST./v1", True),
        ("http://model.localhost/v1", True),
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.1.2.3/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://[::ffff:127.0.0.1]/v1", True),
        ("http://0.0.0.0:8000/v1", True),
        ("http://[::]/v1", True),
        ("https://api.openai.com/v1", False),
        ("http://10.0.0.1:8000/v1", False),
        ("http://localhost.example.com/v1", False),
        ("http://node-1/v1", False),
        ("http://[broken/v1", False),
        ("", False),
    ],
)
def test_loopback_urls(url: str, loopback: bool) -> None:
    assert is_loopback(url) is loopback


def sent(client: ClientConfig) -> Any:
    return call_map(Call("rollout", [ITEM], client, "m", None, 0, None))


def test_only_calls_with_loopback_urls_say_whose_it_is() -> None:
    local, remote = (EndpointConfig(api_base_url=f"http://{host}/v1") for host in ("localhost", "node-1"))
    assert "loopback" not in sent(ClientConfig(api_base_url="http://node-1/v1"))
    assert "loopback" not in sent(ClientConfig(api_base_url="http://localhost/v1", endpoint_configs=(remote,)))
    for client in (ClientConfig(api_base_url="http://localhost/v1"), ClientConfig(endpoint_configs=(remote, local))):
        assert read_call(sent(client)).loopback == loopback_id()


async def test_who_may_use_which_loopback(endpoint: BadEndpoint) -> None:
    """Of servers here and elsewhere only the one elsewhere refuses, and only what it should."""
    policy = KeyPolicy(allow_urls=LOOPBACK_PATTERNS)
    here, elsewhere = ModelEndpoints(policy), ModelEndpoints(policy, loopback="another one")
    config = endpoint.config()
    beside = endpoint.config(on_server_host=True)
    try:
        for endpoints, asked, loopback in (
            (here, config, loopback_id()),
            (here, config, None),
            (elsewhere, config, None),
            (elsewhere, beside, loopback_id()),
        ):
            await chat(endpoints.client(asked, loopback=loopback), "m", PROMPT)
        assert len(endpoint.requests) == 4
        with pytest.raises(ModelAddressError, match=r"set api_base_url.*http://HOST:\d+/v1.*on_server_host=True"):
            await chat(elsewhere.client(config, loopback=loopback_id()), "m", PROMPT)
        assert len(endpoint.requests) == 4
    finally:
        await here.close()
        await elsewhere.close()


async def test_a_server_in_another_network(tmp_path: Path) -> None:
    """P49: refused at the first call, and quickly; with an address that it reaches the rollout runs."""
    from two_hosts import two_hosts

    prefix = f"t{secrets.token_hex(4)}"
    with two_hosts() as hosts:
        model = BadEndpoint("0.0.0.0").will(RIGHT)
        model.open()
        try:
            options = [f"--allow-url=http://{hosts.net}.1:*"]
            with serving(hosts.address, prefix, tmp_path, inside=hosts.inside("one"), options=options):
                async with client_of(hosts.address, prefix) as env, asyncio.timeout(READY_S + 30):
                    await env.wait_for_server(timeout_s=READY_S)
                    base = model.endpoint().model_dump()
                    refused = await env.run_rollout(
                        ITEM, ClientConfig(**base | {"api_base_url": f"http://localhost:{model.port}/v1"}), "m"
                    )
                    assert refused["error"] is not None
                    assert refused["error"]["error"] == "ModelAddressError"
                    assert f"http://HOST:{model.port}/v1" in refused["error"]["error_chain_repr"]
                    assert model.requests == []

                    advertised = f"http://{hosts.net}.1:{model.port}/v1"
                    output = await env.run_rollout(ITEM, ClientConfig(**base | {"api_base_url": advertised}), "m")
                    assert output["error"] is None
                    assert output["reward"] == 1.0
        finally:
            model.close()
