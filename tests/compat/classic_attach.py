"""Tools of the classic library on the fleet, unmodified: attach() and vf-eval, against what they give locally."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from classic_equal import comparable, in_order, plain
from fleet import ENVS, READY_S, Fleet

from envbus.adapters.verifiers import attach
from envbus.bus.embedded import EmbeddedNats
from envbus.demo_model import DemoModel
from envbus.errors import ServerLostError, UsageError
from envbus.settings import ClientSettings

pytest.importorskip("verifiers.serve", reason="before 0.1.11 rollouts had no EnvClient to put in the place of")
from stage_classic import ENV, EVAL_S, ROOT, RUN, TURNS, row, theirs
from verifiers.serve import ServerError

pytestmark = pytest.mark.usefixtures("own_envs")


@contextlib.asynccontextmanager
async def attached(fleet: Fleet, env_args: dict[str, Any], **settings: Any) -> AsyncIterator[Any]:
    """An environment loaded here whose rollouts run on the fleet."""
    fleet.serve(ENV, env_args)
    env = vf.load_environment(ENV, **env_args)
    client = attach(env, fleet.url, prefix=fleet.prefix, **settings)
    try:
        await client.wait_for_server_startup(timeout=READY_S)
        yield env
    finally:
        await env.stop_server()
    assert env.env_client is None


@pytest.mark.parametrize("kind", ["tools", "mixture"])
async def test_an_attached_environment_gives_what_it_gives_alone(
    fleet: Fleet, demo: DemoModel, local_demo: DemoModel, here: Any, kind: str
) -> None:
    """evaluate, run_group and run_rollout, of an EnvGroup with group rewards too; nothing of it runs here."""
    alone = vf.load_environment(ENV, kind=kind)
    kept = await alone.evaluate(here, "m", {"seed": 5}, **RUN)
    async with attached(fleet, {"kind": kind}) as env:
        there = theirs(demo, extra_headers_from_state={"X-Session-ID": "example_id"})
        got = await env.evaluate(there, "m", {"seed": 5}, **RUN)
        assert in_order(plain(got["outputs"])) == in_order(plain(kept["outputs"]))
        assert got["metadata"]["avg_reward"] == kept["metadata"]["avg_reward"]
        assert isinstance(got["outputs"][0], vf.RolloutOutput)
        assert local_demo.requests == demo.requests > 0
        if kind == "tools":
            example = env.get_eval_dataset()[0]
            arguments: Any = ("m", {"n": 1, "seed": 6}, 0, ["trajectory"])
            one = await env.run_rollout(example, there, *arguments)
            assert comparable(plain(one)) == comparable(plain(await alone.run_rollout(example, here, *arguments)))


async def test_failures_are_those_of_the_library(fleet: Fleet, demo: DemoModel, here: Any) -> None:
    async with attached(fleet, TURNS) as env:
        failed = await env.run_rollout(row("library error"), theirs(demo), "m", {})
        alone = await vf.load_environment(ENV, **TURNS).run_rollout(row("library error"), here, "m", {})
        assert comparable(plain(failed)) == comparable(plain(alone))
        assert failed["error"]["error_chain_str"] == "InfraError -> OSError"
        broken = await env.run_rollout(row(turns="x"), theirs(demo), "m", {})
        assert broken["error"]["error"] == "TypeError"
        assert broken["reward"] == 0.0
        assert broken["timing"]["generation"]["duration"] >= 0

        for config, word in (
            (theirs(demo, client_type="anthropic_messages"), "client_type 'anthropic_messages'"),
            (theirs(demo, extra_headers_from_state={"X-Id": "trajectory_id"}), "the example does not hold"),
        ):
            with pytest.raises(ServerError, match=word) as refused:
                await env.run_rollout(row(), config, "m", {})
            assert isinstance(refused.value.__cause__, UsageError)
        with pytest.raises(ValueError, match="ClientConfig in server mode"):
            await env.run_rollout(row(), here, "m", {})


async def test_a_cancelled_call_ends_on_the_server(fleet: Fleet, demo: DemoModel) -> None:
    async with attached(fleet, TURNS) as env:
        call = asyncio.create_task(env.run_rollout(row(turns=500, pause_s=0.5), theirs(demo), "m", {}))
        await fleet.event("turn")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await fleet.event("cleanup")
        turns = len(fleet.events("turn"))
        assert (await env.run_rollout(row(), theirs(demo), "m", {}))["error"] is None
        assert len(fleet.events("turn")) == turns


async def test_without_servers(fleet: Fleet, demo: DemoModel) -> None:
    """Health is false, waiting ends, a call fails; a second client for one environment is refused."""
    env = vf.load_environment(ENV, **TURNS)
    settings = ClientSettings(no_server_timeout_s=1, max_attempts=1)
    client = attach(env, fleet.url, prefix=fleet.prefix, settings=settings)
    with pytest.raises(UsageError, match="has an env_client already"):
        attach(env, fleet.url)
    assert not await client.health()
    with pytest.raises(TimeoutError, match="no server of env"):
        await client.wait_for_server_startup(timeout=0.5)
    with pytest.raises(TimeoutError, match="no server of env"):
        await env.run_rollout(row(), theirs(demo), "m", {})

    server = fleet.serve(ENV, TURNS)
    await client.wait_for_server_startup(timeout=READY_S)
    assert await client.health(timeout=10)
    call = asyncio.create_task(env.run_rollout(row(turns=500, pause_s=0.5), theirs(demo), "m", {}))
    await fleet.event("turn")
    server.reap()
    with pytest.raises(ServerError) as lost:
        await call
    assert isinstance(lost.value.__cause__, ServerLostError)
    await client.close()


@pytest.mark.parametrize("options", [(), ("--disable-env-server",)], ids=["plain", "no-env-server"])
async def test_the_stock_vf_eval_evaluates_on_the_fleet(
    fleet: Fleet, demo: DemoModel, local_demo: DemoModel, here: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Where it runs the environment's package is not there: rows and rollouts come over the bus."""
    kind = "mixture" if options else "tools"
    fleet.serve(ENV, {"kind": kind})
    kept = await vf.load_environment(ENV, kind=kind).evaluate(here, "m", {"seed": 5}, **RUN)
    which = {"env": ENV, "env_args": {"kind": kind}}
    async with fleet.client(ENV, {"kind": kind}) as client:
        await client.wait_for_server(timeout_s=READY_S)
    remote = vf.load_environment("envbus-remote", address=fleet.url, prefix=fleet.prefix, **which)
    assert remote.requires_group_rollouts == (kind == "mixture")
    saved = await asyncio.to_thread(vf_eval, fleet, demo, which, tmp_path, *options)
    assert in_order(saved) == in_order(json.loads(json.dumps(plain(kept["outputs"]))))
    assert demo.requests == local_demo.requests


def vf_eval(fleet: Fleet, demo: DemoModel, which: dict[str, Any], folder: Path, *options: str) -> list[Any]:
    """What the library's vf-eval saved."""
    place = {**which, "address": fleet.url, "prefix": fleet.prefix}
    command = [sys.executable, "-P", "-m", "verifiers.scripts.eval", "envbus-remote", "-a", json.dumps(place)]
    command += ["-m", "m", "-b", demo.base_url, "-k", "EMPTY", "-S", '{"seed": 5}', "-n", "3", "-r", "2", "-s", "-d"]
    work = folder / "vf-eval"
    work.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *options], cwd=work, env=environ, timeout=EVAL_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr
    (results,) = work.glob("outputs/evals/envbus-remote--m/*/results.jsonl")
    return [json.loads(line) for line in results.read_text().splitlines()]


async def test_the_documentation_does_what_it_shows(own_nats: EmbeddedNats, demo: DemoModel, tmp_path: Path) -> None:
    fleet = Fleet(own_nats.url, "env", tmp_path)
    try:
        for env_id in ("reverse-text", ENV):
            fleet.serve(env_id)
            async with fleet.client(env_id) as client:
                await client.wait_for_server(timeout_s=READY_S)
        for mark, shell, says in (
            ("attach", (sys.executable, "-c"), "reward "),
            ("vf-eval", ("sh", "-euc"), "reward: avg"),
        ):
            text = (
                block(mark)
                .replace("nats://127.0.0.1:4222", fleet.url)
                .replace("http://127.0.0.1:8000/v1", demo.base_url)
            )
            done = await asyncio.to_thread(run, *shell, text.replace("my-env", ENV), folder=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
            assert says in done.stdout
    finally:
        fleet.reap()


def block(mark: str) -> str:
    """The block of docs/verifiers.md with this mark."""
    (text,) = re.findall(
        rf"^```\w+ {mark}\n(.*?)^```$", (ROOT / "docs/verifiers.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return str(text)


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PYTHONPATH": str(ENVS), "PATH": path}
    return subprocess.run(command, cwd=folder, env=environ, timeout=EVAL_S, capture_output=True, text=True, check=False)


async def test_a_mixture_of_envs_of_the_bus(fleet: Fleet, demo: DemoModel) -> None:
    """One of them is native to envbus: its outputs have the library's shape, its reward functions are metrics."""
    fleet.serve(ENV, {"kind": "tools"})
    fleet.serve("reverse-text")
    for env_id, env_args in ((ENV, {"kind": "tools"}), ("reverse-text", None)):
        async with fleet.client(env_id, env_args) as client:
            await client.wait_for_server(timeout_s=READY_S)
    place = {"address": fleet.url, "prefix": fleet.prefix}
    tools = vf.load_environment("envbus-remote", env=ENV, env_args={"kind": "tools"}, **place)
    native = vf.load_environment("envbus-remote", env="reverse-text", **place)
    assert not native.requires_group_rollouts
    with pytest.raises(UsageError, match="envbus serve -x"):
        native.set_kwargs(score_rollouts=False)
    try:
        group = vf.EnvGroup([tools, native], env_names=["tools", "native"])
        outputs = (await group.evaluate(theirs(demo), "m", {}, num_examples=7))["outputs"]
        assert [output["info"]["env_id"] for output in outputs] == ["tools"] * 5 + ["native"] * 2
        assert not any(output["error"] for output in outputs)
        assert set(outputs[0]) - {"right", "add_calls", "total_tool_calls", "info"} <= set(outputs[-1])
        assert set(outputs[0]["timing"]) == set(outputs[-1]["timing"])
        assert outputs[-1]["similarity"] == outputs[-1]["metrics"]["similarity"] == outputs[-1]["reward"] > 0
    finally:
        await group._teardown()
        await tools._teardown()
        await native._teardown()
