"""generate and evaluate over an environment, and the hand-over to a server."""

from __future__ import annotations

from typing import Any

import pytest
from env_model_stub import ModelStub, completion, error_reply

from envbus.environments import Rubric, SingleTurnEnv
from envbus.errors import UsageError
from envbus.types import ClientConfig


class FakeServer:
    """Stands for a client of a served environment."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def run_rollout(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return {"example_id": arguments[0]["example_id"], "reward": 0.5, "error": None}

    async def run_group(self, inputs: Any, *arguments: Any) -> Any:
        return [await self.run_rollout(input, *arguments) for input in inputs]


def ranked(states: list[Any]) -> list[float]:
    return [float(i) for i in range(len(states))]


def env(rows: int = 3, rubric: Rubric | None = None) -> SingleTurnEnv:
    examples = [{"question": f"q{i}", "answer": str(i)} for i in range(rows)]
    return SingleTurnEnv(dataset=examples, rubric=rubric or Rubric([lambda: 1.0]), env_id="e")


async def test_evaluate_counts_failures_apart(stub: ModelStub) -> None:
    """P02, P16: three of twenty fail; seventeen are kept and the mean is theirs."""
    bad = {"q7", "q9", "q11"}

    def answer(request: dict[str, Any]) -> Any:
        return error_reply(400) if request["messages"][-1]["content"] in bad else completion()

    stub.answer = answer
    results = await env(20).evaluate(stub.config(), "m", max_concurrent=4)

    assert [output["example_id"] for output in results["outputs"]] == list(range(20))
    assert [i for i, output in enumerate(results["outputs"]) if output["error"]] == [7, 9, 11]
    assert results["metadata"]["num_failed"] == 3
    assert results["metadata"]["errors_by_type"] == {"ModelError": 3}
    assert results["metadata"]["avg_reward"] == 1.0


async def test_evaluate_scores_groups_together(stub: ModelStub) -> None:
    grouped = env(rubric=Rubric([ranked]))

    results = await grouped.evaluate(stub.config(), "m", num_examples=2, rollouts_per_example=3)

    assert [output["reward"] for output in results["outputs"]] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(UsageError, match="independent_scoring"):
        await grouped.evaluate(stub.config(), "m", independent_scoring=True)


async def test_generate_takes_datasets(stub: ModelStub) -> None:
    datasets = pytest.importorskip("datasets")
    inputs = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}], "example_id": 4}])

    results = await env().generate(inputs, stub.config(), "m", state_columns=["turn"])

    assert results["outputs"][0]["example_id"] == 4
    assert results["outputs"][0]["turn"] == 1  # type: ignore[typeddict-item]


async def test_with_a_server_rollouts_go_there() -> None:
    served = env()
    served.env_client = server = FakeServer()
    config = ClientConfig()

    results = await served.evaluate(config, "m", {"top_p": 1}, num_examples=2, max_retries=4, state_columns=["a"])
    await served.run_group(list(served.eval_examples()), config, "m")

    assert [output["reward"] for output in results["outputs"]] == [0.5, 0.5]
    assert server.calls[0][1:] == (config, "m", {"top_p": 1}, 4, ["a"])
    assert len(server.calls) == 5


async def test_with_a_server_a_live_client_is_refused() -> None:
    served = env()
    served.env_client = FakeServer()

    with pytest.raises(UsageError, match="ClientConfig"):
        await served.run_rollout(served.eval_examples()[0], object(), "m")
    with pytest.raises(UsageError, match="ClientConfig"):
        await served.run_group(list(served.eval_examples()), object(), "m")


async def test_a_server_needs_a_name() -> None:
    with pytest.raises(UsageError, match="env_id"):
        await SingleTurnEnv(dataset=[{"question": "q"}]).start_server()
