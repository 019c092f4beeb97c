"""Tasksets of verifiers 0.4 give the same episodes on the fleet as from the library's own server and client."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from fleet import ENVS, READY_S, Fleet, endpoint, importable_envs
from taskset_stock import SAMPLING, Assembly, differences, stock_client, their_client, their_request, whole

from envbus.adapters.hosting import load_hosted
from envbus.demo_model import DemoModel

PROBE: tuple[str, dict[str, Any]] = ("probe-taskset", {})
NULL_HARNESS = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
MARBLE: tuple[str, dict[str, Any]] = ("marble-v1", {**NULL_HARNESS, "taskset": {"pieces": 2}})
EVAL_S = 240


@pytest.fixture(autouse=True)
def own_envs() -> Iterator[None]:
    with importable_envs():
        yield


def served() -> list[tuple[str, dict[str, Any]]]:
    return [PROBE, MARBLE] if find_spec("marble_v1") else [PROBE]


@pytest.mark.parametrize(("env_id", "env_args"), served(), ids=[env_id for env_id, _ in served()])
async def test_episodes_are_those_of_the_librarys_own_server(
    fleet: Fleet, demo: DemoModel, env_id: str, env_args: dict[str, Any]
) -> None:
    """Streamed and whole; asked for as its client asks, and as ours does."""
    fleet.serve(env_id, env_args)
    task_data: dict[str, Any]
    async with fleet.client(env_id, env_args) as client:
        await client.wait_for_server(timeout_s=READY_S)
        (_, row) = await client.examples(2)
        task_data = row["task_data"]
        assembly = Assembly()
        request = their_request(task_data, their_client(demo.base_url))
        streamed = await client.run_rollout(request, None, "m", on_progress=assembly.on_progress)
        ours = await client.run_rollout(row, endpoint(demo.base_url), "m", SAMPLING)
    async with stock_client(env_id, env_args) as stock:
        deltas: list[dict[str, Any]] = []
        theirs = await stock.run(
            their_client(demo.base_url), "m", vf.SamplingConfig(**SAMPLING), task_data, deltas.append
        )
    assert len(theirs.traces[0].nodes) >= 2
    assert differences(assembly.episode(streamed), theirs) == []
    assert [sorted(delta) for delta in assembly.deltas if "nodes" in delta] == [
        sorted(delta) for delta in deltas if "nodes" in delta
    ]
    in_one = whole(ours)
    _same_client(theirs, in_one)
    assert differences(in_one, theirs) == []
    assert streamed["episode"]["traces"][0]["nodes"] == len(theirs.traces[0].nodes)
    assert streamed["reward"] == ours["reward"] == theirs.traces[0].reward
    assert "prompt" not in streamed
    assert ours["completion"][0]["role"] == "assistant"
    assert ours["prompt"] == row["prompt"]
    assert ours["error"] is None
    assert ours["token_usage"]["output_tokens"] == theirs.num_output_tokens


def _same_client(theirs: Any, ours: Any) -> None:
    """Our ClientConfig has other names for no key and no limit."""
    for trace, twin in zip(theirs.traces, ours.traces, strict=True):
        twin.agent.config.client = trace.agent.config.client


async def test_deltas_come_while_the_episode_runs(fleet: Fleet, demo: DemoModel) -> None:
    """The second turn waits for what the first one's delta brings about."""
    env_id, env_args = PROBE
    fleet.serve(env_id, env_args)
    async with fleet.client(env_id, env_args) as client:
        await client.wait_for_server(timeout_s=READY_S)
        (row,) = await client.examples(1)
        assembly = Assembly()

        def on_progress(progress: Any) -> None:
            assembly.on_progress(progress)
            if "nodes" in progress.data:
                Path(f"{fleet.ledger}.gate").touch()

        request = their_request({**row["task_data"], "do": "wait", "turns": 4}, their_client(demo.base_url))
        async with asyncio.timeout(READY_S):
            output = await client.run_rollout(request, None, "m", on_progress=on_progress)
        trace = assembly.episode(output).traces[0]
        assert trace.num_turns == 4
        assert sum("nodes" in delta for delta in assembly.deltas) == 4


async def test_a_group_streams_into_one_assembly(fleet: Fleet, demo: DemoModel) -> None:
    """Traces have ids of their own, and are in the outputs, too; a member whose input is no task fails alone."""
    env_id, env_args = PROBE
    fleet.serve(env_id, env_args)
    async with fleet.client(env_id, env_args) as client:
        await client.wait_for_server(timeout_s=READY_S)
        rows = await client.examples(2)
        assembly = Assembly()
        members = [*rows, {**rows[0], "task_data": {"turns": "many"}}]
        outputs = await client.run_group(members, endpoint(demo.base_url), "m", on_progress=assembly.on_progress)
        for number, output in enumerate(outputs[:2]):
            assert assembly.episode(output) == whole(output)
            assert output["episode"]["head"]["task"]["data"]["idx"] == number
        turns = {(delta["position"], delta["example_id"], delta["turn"]) for delta in assembly.deltas}
        assert {(0, 0, 2), (1, 1, 2)} <= turns
        assert outputs[2]["error"]["error"] == "BadRequestError"
        assert "task_data.turns" in outputs[2]["error"]["error_chain_repr"]


async def test_examples_of_an_endless_taskset_are_made_when_asked_for(fleet: Fleet, demo: DemoModel) -> None:
    endless = {"taskset": {"size": None}}
    fleet.serve("probe-taskset", endless)
    few = {**endless, "select": {"skip": 5, "limit": 2}}
    async with fleet.client("probe-taskset", endless) as client:
        info = await client.wait_for_server(timeout_s=READY_S)
        assert info.num_eval_examples == 1000
        assert [row["example_id"] for row in await client.examples(3)] == [0, 1, 2]
        assert len(fleet.events("loaded")) < 1000
    assert [row["example_id"] for row in load_hosted("probe-taskset", few).eval_examples()] == [5, 6]


@pytest.mark.parametrize("place", ["bus", "here"])
def test_envbus_eval_of_a_taskset(demo: DemoModel, tmp_path: Path, place: str) -> None:
    """With servers of its own, and in its own process."""
    command = [sys.executable, "-P", "-m", "envbus", "eval", "probe-taskset", "-m", "m", "-b", demo.base_url]
    command += ["-k", "", "-n", "2", "-r", "2", "-S", json.dumps(SAMPLING), "-s", "-o", str(tmp_path)]
    command += ["--disable-env-server"] if place == "here" else []
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ENVS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, timeout=EVAL_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = tmp_path.rglob("results.jsonl")
    outputs = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(outputs) == 4
    for output in outputs:
        assert output["error"] is None
        assert output["reward"] == 2 * output["metrics"]["right"] + output["metrics"]["length"] / 2
        assert output["metrics"]["turns"] == 2
