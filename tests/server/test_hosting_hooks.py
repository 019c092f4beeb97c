"""What hosted environments may ask for beside the five members: a checked client config, a start before they serve."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from envbus import ClientConfig, NATSEnvClient, NATSEnvServer
from envbus.adapters.hosting import _taskset_loader
from envbus.errors import EnvironmentCrashedError, ModelAddressError, ModelKeyError
from envbus.server.model_endpoints import KeyPolicy, ModelEndpoints
from envbus.types import CheckedClient, EndpointConfig

MODEL = "https://model.example/v1"


class Hosted:
    """Says what it was given as its client."""

    requires_group_rollouts = False
    wants_client_config = True

    def __init__(self) -> None:
        self.clients: list[Any] = []
        self.events: list[str] = []
        self.opening = asyncio.Event()
        self.opened = asyncio.Event()
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.trouble: Exception | None = None

    async def open(self) -> None:
        self.events.append("opening")
        self.opening.set()
        await self.may_open.wait()
        if self.trouble is not None:
            raise self.trouble
        self.events.append("open")
        self.opened.set()

    async def run_rollout(self, input: Any, client: Any, model: str, *arguments: Any, **options: Any) -> Any:
        self.clients.append(client)
        return {"example_id": input["example_id"], "reward": 1.0}

    async def run_group(self, group_inputs: Any, client: Any, model: str, *arguments: Any, **options: Any) -> Any:
        return [await self.run_rollout(each, client, model) for each in group_inputs]

    def eval_examples(self) -> Any:
        self.events.append("examples")
        return []

    async def close(self) -> None:
        self.events.append("close")


@asynccontextmanager
async def serving(url: str, prefix: str, hosted: Hosted, **options: Any) -> AsyncIterator[NATSEnvServer]:
    server = NATSEnvServer("hooks", address=url, prefix=prefix, environment=hosted, handle_signals=False, **options)
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        await server.close()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_client_config_and_the_word_on_it(nats_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOD_KEY", "good")
    monkeypatch.setenv("OTHER_KEY", "other")
    hosted = Hosted()
    one, two = (EndpointConfig(api_base_url=f"https://{name}.example/v1", api_key_var=None) for name in ("a", "b"))
    row: Any = {"prompt": [], "example_id": 0}
    async with (
        serving(nats_url, prefix, hosted, allow_keys=["GOOD_KEY=https://model.example"]),
        NATSEnvClient(nats_url, "hooks", prefix=prefix) as client,
    ):
        await client.wait_for_server()
        for config in (ClientConfig(api_base_url=MODEL, api_key_var="GOOD_KEY"), None):
            await client.run_rollout(row, config, "m")
        for _ in range(2):
            await client.run_rollout(row, ClientConfig(endpoint_configs=(one, two)), "m")
    given, nothing, *in_turn = hosted.clients
    assert isinstance(given, CheckedClient)
    assert given.endpoint is not None
    assert given.endpoint.api_base_url == MODEL
    assert nothing.endpoint is None
    assert [each.endpoint for each in in_turn] == [one, two]
    given.check(given.endpoint)
    for variable, url in (("OTHER_KEY", MODEL), ("GOOD_KEY", "https://other.example"), ("UNSET_KEY", MODEL)):
        with pytest.raises(ModelKeyError):
            nothing.check(EndpointConfig(api_base_url=url, api_key_var=variable))


def test_a_loopback_of_elsewhere_is_refused() -> None:
    endpoints = ModelEndpoints(KeyPolicy(allow_urls=["http://127.0.0.1:*"]), loopback="here")
    local = EndpointConfig(api_base_url="http://127.0.0.1:8000/v1", api_key_var=None)
    endpoints.checked(None, loopback="here").check(local)
    with pytest.raises(ModelAddressError):
        endpoints.checked(None, loopback="elsewhere").check(local)


async def test_it_is_open_before_it_serves(nats_url: str, prefix: str) -> None:
    hosted = Hosted()
    async with serving(nats_url, prefix, hosted), NATSEnvClient(nats_url, "hooks", prefix=prefix) as client:
        await client.wait_for_server()
        assert hosted.events == ["opening", "open", "examples"]
    assert hosted.events[3:] == ["close"]


async def test_a_stop_while_it_opens(nats_url: str, prefix: str) -> None:
    hosted = Hosted()
    hosted.may_open.clear()
    async with serving(nats_url, prefix, hosted):
        async with asyncio.timeout(20):
            await hosted.opening.wait()
    assert hosted.events == ["opening", "close"]


async def test_an_open_that_fails(nats_url: str, prefix: str) -> None:
    hosted = Hosted()
    hosted.trouble = OSError("no such tool server")
    server = NATSEnvServer("hooks", address=nats_url, prefix=prefix, environment=hosted, handle_signals=False)
    with pytest.raises(EnvironmentCrashedError, match="could not start: OSError\\('no such tool server'\\)"):
        await server.run()
    assert hosted.events == ["opening", "close"]


def test_a_taskset_is_told_by_what_its_module_exports() -> None:
    taskset = type("Taskset", (), {"__module__": "verifiers.v1.taskset"})
    own = type("Own", (taskset,), {})
    for exported, is_taskset in (({"Own": own}, True), ({}, False), ({"Own": type("Own", (), {})}, False)):
        module = ModuleType("some_module")
        vars(module).update({**exported, "__all__": list(exported), "Unexported": own})
        assert (_taskset_loader("some-module", True, module) is not None) is is_taskset


async def test_signals_do_what_they_did_before_once_a_server_has_ended(nats_url: str, prefix: str) -> None:
    """A program that serves for a while can be ended by SIGTERM afterwards, and so can what it starts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hosted = Hosted()
    server = NATSEnvServer("hooks", address=nats_url, prefix=prefix, environment=hosted)
    running = asyncio.create_task(server.run())
    await asyncio.wait_for(hosted.opened.wait(), 30)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    assert hosted.events[-1] == "close"
    assert {number: signal.getsignal(number) for number in before} == before
