"""The classic library's own ZMQEnvClient and vf-eval, unmodified, through a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf
from classic_equal import comparable, in_order, plain
from fleet import ENVS, READY_S, Fleet
from gateway_process import gateway

from envbus.demo_model import DemoModel

pytest.importorskip("verifiers.serve", reason="before 0.1.11 there was no server to stand in for")
from stage_classic import ENV, EVAL_S, ROOT, RUN, TURNS, row, theirs
from verifiers.serve import ZMQEnvClient

pytestmark = pytest.mark.usefixtures("own_envs")


@contextlib.asynccontextmanager
async def connected(fleet: Fleet, env_args: dict[str, Any], *, servers: int = 1) -> AsyncIterator[ZMQEnvClient]:
    """The library's client, connected to a gateway; it waits for the fleet as it does for its own server."""
    name = fleet.client(ENV, env_args).env
    for _ in range(servers):
        fleet.serve(ENV, env_args)
    async with gateway(fleet, name) as (address,):
        client = ZMQEnvClient(address)
        try:
            await client.wait_for_server_startup(timeout=READY_S)
            yield client
        finally:
            await client.close()


@pytest.mark.parametrize("kind", ["tools", "mixture"])
async def test_outputs_are_those_of_a_local_run(
    fleet: Fleet, demo: DemoModel, local_demo: DemoModel, here: Any, kind: str
) -> None:
    """evaluate, with group rewards too, and run_rollout."""
    alone = vf.load_environment(ENV, kind=kind)
    kept = await alone.evaluate(here, "m", {"seed": 5}, **RUN)
    async with connected(fleet, {"kind": kind}) as client:
        assert await client.health()
        env = vf.load_environment(ENV, kind=kind)
        env.env_client = client
        got = await env.evaluate(theirs(demo), "m", {"seed": 5}, **RUN)
        assert in_order(plain(got["outputs"])) == in_order(plain(kept["outputs"]))
        assert got["metadata"]["avg_reward"] == kept["metadata"]["avg_reward"]
        if kind == "tools":
            example = env.get_eval_dataset()[0]
            arguments: Any = ("m", {"n": 1, "seed": 6}, 0, ["trajectory"])
            one = await client.run_rollout(example, theirs(demo), *arguments)
            assert comparable(plain(one)) == comparable(plain(await alone.run_rollout(example, here, *arguments)))


async def test_failures_and_refusals(fleet: Fleet, demo: DemoModel) -> None:
    async with connected(fleet, TURNS) as client:
        failed = await client.run_rollout(row("library error"), theirs(demo), "m", {})
        assert failed["error"]["error_chain_str"] == "InfraError -> OSError"
        with pytest.raises(RuntimeError, match="client_type 'anthropic_messages'"):
            await client.run_rollout(row(), theirs(demo, client_type="anthropic_messages"), "m", {})


async def test_a_cancelled_call_ends_on_the_server(fleet: Fleet, demo: DemoModel) -> None:
    async with connected(fleet, TURNS) as client:
        call = asyncio.create_task(client.run_rollout(row(turns=500, pause_s=0.5), theirs(demo), "m", {}))
        await fleet.event("turn")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await fleet.event("cleanup")
        assert (await client.run_rollout(row(), theirs(demo), "m", {}))["error"] is None


async def test_a_killed_server_is_not_noticed(fleet: Fleet, demo: DemoModel) -> None:
    name = fleet.client(ENV, TURNS).env
    first = fleet.serve(ENV, TURNS)
    async with gateway(fleet, name) as (address,):
        client = ZMQEnvClient(address)
        try:
            await client.wait_for_server_startup(timeout=READY_S)
            rows = [row(turns=3, pause_s=2) for _ in range(10)]
            calls = [asyncio.create_task(client.run_rollout(each, theirs(demo), "m", {})) for each in rows]
            await fleet.event("turn", count=10)
            fleet.serve(ENV, TURNS)
            first.signal(signal.SIGKILL)
            outputs = await asyncio.gather(*calls)
            assert [output["error"] for output in outputs] == [None] * 10
        finally:
            await client.close()


async def test_the_stock_vf_eval(
    fleet: Fleet, demo: DemoModel, local_demo: DemoModel, here: Any, tmp_path: Path
) -> None:
    args = {"kind": "tools"}
    fleet.serve(ENV, args)
    kept = await vf.load_environment(ENV, **args).evaluate(here, "m", {"seed": 5}, **RUN)
    async with gateway(fleet, fleet.client(ENV, args).env) as (address,):
        place = {"env": ENV, "env_args": args, "address": address}
        saved = await asyncio.to_thread(vf_eval, demo, place, tmp_path)
    assert in_order(saved) == in_order(json.loads(json.dumps(plain(kept["outputs"]))))
    assert demo.requests == local_demo.requests


def vf_eval(demo: DemoModel, place: dict[str, Any], folder: Path) -> list[Any]:
    """What the library's vf-eval saved."""
    command = [sys.executable, "-P", "-m", "verifiers.scripts.eval", "through-gateway", "-a", json.dumps(place)]
    command += ["-m", "m", "-b", demo.base_url, "-k", "EMPTY", "-S", '{"seed": 5}', "-n", "3", "-r", "2", "-s", "-d"]
    work = folder / "vf-eval"
    work.mkdir()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ENVS), str(ROOT)])}
    done = subprocess.run(
        [*command, "--disable-env-server"], cwd=work, env=environ, timeout=EVAL_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = work.glob("outputs/evals/through-gateway--m/*/results.jsonl")
    return [json.loads(line) for line in results.read_text().splitlines()]
