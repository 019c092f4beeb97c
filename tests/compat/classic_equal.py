"""Classic environments give the same on the fleet as in a local run: rows, rollouts, groups, evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgpack
import openai
import pytest
import verifiers as vf
from fleet import READY_S, Fleet, endpoint, importable_envs

from envbus.demo_model import DemoModel

try:
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.utils.serve_utils import msgpack_encoder
except ModuleNotFoundError:
    from verifiers.utils.worker_utils import msgpack_encoder

    OpenAIChatCompletionsClient = None

RANDOM = {"timing", "trajectory_id"}
"""Fields that differ between two local runs, too."""
FOREIGN = {
    "sophistry_bench_sprint": ("sophistry-bench-sprint", {"n_items": 4}),
    "stardata": ("stardata.envs.constraint_gym", {}),
    "falsepass": ("falsepass._demo.falsepass_toy_env", {"n": 5}),
}
OWN = [("probe-classic", {"kind": kind}) for kind in ("turns", "tools", "mixture")]


@pytest.fixture(autouse=True)
def own_envs() -> Iterator[None]:
    with importable_envs():
        yield


def installed() -> list[tuple[str, dict[str, Any]]]:
    from importlib.util import find_spec

    return [env for package, env in FOREIGN.items() if find_spec(package) is not None] + OWN


def plain(output: Any) -> Any:
    """An output as the library's own server would send it."""
    return msgpack.unpackb(msgpack.packb(output, default=msgpack_encoder))


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items() if name not in RANDOM}
    return [comparable(each) for each in value] if isinstance(value, list) else value


def in_order(outputs: Any) -> list[Any]:
    """Members of a group reach the model in any order, and get its answers in that order."""
    return sorted((comparable(output) for output in outputs), key=lambda output: json.dumps(output, sort_keys=True))


def library_client(base_url: str) -> Any:
    """As the library makes one; until 0.1.10 it had no clients of its own."""
    plain_client = openai.AsyncOpenAI(base_url=base_url, api_key="EMPTY")
    return OpenAIChatCompletionsClient(plain_client) if OpenAIChatCompletionsClient is not None else plain_client


@pytest.mark.parametrize(("env_id", "env_args"), installed(), ids=lambda value: str(value).replace("'", ""))
async def test_outputs_are_those_of_a_local_run(
    fleet: Fleet, demo: DemoModel, local_demo: DemoModel, env_id: str, env_args: dict[str, Any]
) -> None:
    fleet.serve(env_id, env_args, "--max-concurrent", "8")
    env = vf.load_environment(env_id, **env_args)
    here = library_client(local_demo.base_url)
    there = endpoint(demo.base_url)
    rows = env.get_eval_dataset().to_list()[:4]
    async with fleet.client(env_id, env_args) as client:
        info = await client.wait_for_server(timeout_s=READY_S)
        assert info.num_eval_examples == len(env.get_eval_dataset())
        assert await client.examples(4) == plain(rows)

        columns = ["trajectory", "sampling_args"]
        if not info.requires_group_rollouts:
            for number, row in enumerate(rows):
                sampling = {"n": 1, "extra_body": {}, "seed": number}
                local = plain(await env.run_rollout(row, here, "m", sampling, state_columns=columns))
                remote = await client.run_rollout(row, there, "m", {"seed": number}, state_columns=columns)
                assert comparable(remote) == comparable(local)
                assert set(remote) == set(local)
                assert set(remote["timing"]) == set(local["timing"])

        for row in rows:
            local = plain(await env.run_group([row] * 3, here, "m", {}, state_columns=["trajectory"]))
            remote = await client.run_group([row] * 3, there, "m", {}, state_columns=["trajectory"])
            assert in_order(remote) == in_order(local)

        alone = not info.requires_group_rollouts  # the library scores in groups unless it is told not to
        settings: dict[str, Any] = {"num_examples": 3, "rollouts_per_example": 2, "state_columns": columns}
        kept = await env.evaluate(here, "m", {"seed": 5}, independent_scoring=alone, **settings)
        got = await client.evaluate(there, "m", {"seed": 5}, **settings)
        assert in_order(got["outputs"]) == in_order(plain(kept["outputs"]))
        assert got["metadata"]["num_failed"] == 0
