"""Servers of tasksets: how they are found and started, keys, failures, cancels, signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import READY_S, Fleet, endpoint, importable_envs
from taskset_stock import their_client, their_request

from envbus.adapters.hosting import load_hosted
from envbus.demo_model import DemoModel
from envbus.errors import EnvArgsError, EnvironmentLoadError, LoaderMissingError

ENV = "probe-taskset"
DATA = {"idx": 0, "prompt": "Add 1 and 2.", "answer": "3"}


@pytest.fixture(autouse=True)
def own_envs() -> Iterator[None]:
    with importable_envs():
        yield


def open_gate(fleet: Fleet) -> None:
    Path(f"{fleet.ledger}.gate").touch()


def row(do: str = "run", **data: Any) -> Any:
    return {"example_id": 0, "prompt": [], "task_data": {**DATA, "do": do, **data}}


async def test_a_cancelled_call_ends_on_the_server(fleet: Fleet, demo: DemoModel) -> None:
    fleet.serve(ENV)
    async with fleet.client(ENV) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(client.run_rollout(row("wait"), endpoint(demo.base_url), "m"))
        await fleet.event("turn")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await fleet.event("cleanup")
        assert (await client.run_rollout(row(), endpoint(demo.base_url), "m"))["error"] is None
        assert len(fleet.events("turn")) == 3


async def test_a_signal_drains_the_server_and_stops_what_is_shared(fleet: Fleet, demo: DemoModel) -> None:
    server = fleet.serve(ENV)
    async with fleet.client(ENV) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(client.run_rollout(row("wait"), endpoint(demo.base_url), "m"))
        await fleet.event("turn")
        server.signal(signal.SIGTERM)
        open_gate(fleet)
        assert (await call)["error"] is None
        assert await server.exit_code() == 0
    events = [line.split()[0] for line in fleet.events() if not line.startswith("loaded")]
    assert events == ["start", "turn", "turn", "cleanup", "stop"]


async def test_failures_keep_their_types_and_causes(fleet: Fleet, demo: DemoModel) -> None:
    fleet.serve(ENV)
    here = endpoint(demo.base_url)
    async with fleet.client(ENV) as client:
        await client.wait_for_server(timeout_s=READY_S)

        async def error_of(item: Any, client_config: Any = here) -> Any:
            output = await client.run_rollout(item, client_config, "m")
            assert output["reward"] is None
            assert output["error"]["error_chain_str"].split(" -> ")[0] == output["error"]["error"]
            return output["error"]

        setup = await error_of(row("raise in setup"))
        assert setup["error_chain_str"] == "TaskError -> RuntimeError -> KeyError"
        assert setup["error_chain_repr"].endswith("RuntimeError('broken') -> KeyError(\"'cause'\")")
        assert setup["error_bases"][:2] == ["TaskError", "RolloutError"]
        reward = await error_of(row("raise in reward"))
        assert reward["error_chain_repr"].endswith(r"ValueError('no\nreward')")
        assert (await error_of(row("raise in the env")))["error_chain_str"] == "EnvError -> LookupError"

        demo.fail_next(503)
        provider = await error_of(row())
        assert provider["error"] == "ProviderError"
        assert provider["retryable"] is True
        demo.fail_next(503)
        again = await client.run_rollout(row(), here, "m", max_retries=1)
        assert again["error"] is None

        assert "has 'task_data'" in (await error_of({"prompt": [], "example_id": 0}))["error_chain_repr"]
        assert "task_data.turns" in (await error_of(row(turns="many")))["error_chain_repr"]
        assert "pass a client" in (await error_of(row(), None))["error_chain_repr"]
        unknown = {**row(), "client": {"type": "eval", "base_url": "http://x", "secret": "s3cr3t"}}
        refused = await error_of(unknown, None)
        assert refused["error"] == "BadRequestError"
        assert "s3cr3t" not in str(refused)


async def test_no_variable_is_read_that_is_not_allowed(fleet: Fleet, demo: DemoModel) -> None:
    """Keys, and headers from variables: of the library's client config and of ours."""
    allowed = f"GOOD_KEY={demo.base_url.removesuffix('/v1')}"
    secrets = {"GOOD_KEY": "good", "OTHER_KEY": "secret", "PRIME_API_KEY": "secret", "EMPTY": "secret"}
    fleet.serve(ENV, None, "--allow-key", allowed, **secrets)
    async with fleet.client(ENV) as client:
        await client.wait_for_server(timeout_s=READY_S)
        asked = demo.requests
        refused = [
            their_request(DATA, their_client(demo.base_url, **settings))
            for settings in (
                {"api_key_var": "OTHER_KEY"},
                {"api_key_var": "PRIME_API_KEY"},
                {"api_key_var": "EMPTY"},
                {"api_key_var": "UNSET_KEY"},
                {"headers_from_env": {"X-A": "OTHER_KEY"}, "api_key_var": "GOOD_KEY"},
            )
        ]
        refused += [their_request(DATA, their_client("http://127.0.0.1:9/v1", api_key_var="GOOD_KEY"))]
        for request in refused:
            output = await client.run_rollout(request, None, "m")
            assert output["error"]["error"] == "ModelKeyError", request
        output = await client.run_rollout(row(), endpoint(demo.base_url, api_key_var="OTHER_KEY"), "m")
        assert output["error"]["error"] == "ModelKeyError"
        assert demo.requests == asked

        settings = {"headers_from_env": {"X-A": "GOOD_KEY"}, "api_key_var": "GOOD_KEY"}
        good = await client.run_rollout(their_request(DATA, their_client(demo.base_url, **settings)), None, "m")
        assert good["error"] is None
        good = await client.run_rollout(row(), endpoint(demo.base_url, api_key_var="GOOD_KEY"), "m")
        assert good["error"] is None


async def test_a_start_that_fails_ends_the_server(fleet: Fleet) -> None:
    server = fleet.serve(ENV, {"start": "raise"})
    assert await server.exit_code() != 0
    assert "OSError('no such tool server')" in server.log
    assert fleet.events()[-1] == "stop "


async def test_a_signal_ends_a_start_that_takes_long(fleet: Fleet) -> None:
    server = fleet.serve(ENV, {"start": "wait"})
    await fleet.event("start")
    server.signal(signal.SIGTERM)
    assert await server.exit_code() == 0
    assert fleet.events()[-1] == "stop "


def test_what_is_a_taskset_and_what_its_arguments_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "probe_neither.py").write_text("import verifiers.v1 as vf\nfrom verifiers.v1 import Taskset\n")
    with pytest.raises(LoaderMissingError, match="exports no taskset"):
        load_hosted("probe-neither", {})
    (tmp_path / "probe_both.py").write_text("from probe_taskset import *\ndef load_environment(): return 'loaded'\n")
    assert load_hosted("probe-both", {}) == "loaded"
    # A bundled environment of the same name is not in a taskset's way.
    (tmp_path / "gsm8k.py").write_text("from probe_taskset import *\n__all__ = ['ProbeTaskset']\n")
    assert len(load_hosted("owner/gsm8k@1.0", {"taskset": {"size": 2}}).eval_examples()) == 2
    for arguments, word in (
        ({"sise": 3}, "sise"),
        ({"taskset": {"sise": 3}}, "taskset.sise"),
        ({"taskset": {"id": "other"}}, "of another taskset, 'other'"),
        ({"taskset": 3}, "must be a map"),
        ({"select": {"limit": 0}}, "limit"),
    ):
        with pytest.raises(EnvArgsError, match=word):
            load_hosted(ENV, arguments)
    hidden = "from probe_taskset import *\nimport verifiers.v1 as vf\nfrom pydantic import Field\n"
    hidden += "class Data(vf.TaskData):\n    key: str = Field('', exclude=True)\n"
    hidden += "class HidingTask(vf.Task[Data]): pass\n"
    hidden += "class Hiding(vf.Taskset[HidingTask, vf.TasksetConfig]):\n    def load(self): return []\n"
    (tmp_path / "probe_hiding.py").write_text(hidden + "__all__ = ['Hiding']\n")
    with pytest.raises(EnvironmentLoadError, match="excludes key"):
        load_hosted("probe-hiding", {"agent": {"runtime": {"type": "subprocess"}}})
