from __future__ import annotations

from typing import Any

import pytest
from env_model_stub import ModelStub, completion

from envbus.environments import EnvGroup, Rubric, SingleTurnEnv, teardown
from envbus.errors import UsageError


class ClosingEnv(SingleTurnEnv):
    closed = 0

    @teardown
    async def shut(self) -> None:
        self.closed += 1


def env(name: str, rows: int = 2, rubric: Rubric | None = None, **settings: Any) -> ClosingEnv:
    examples = [{"question": f"{name}{i}", "answer": name} for i in range(rows)]
    return ClosingEnv(dataset=examples, rubric=rubric or Rubric([lambda: 1.0]), env_id=name, **settings)


def ranked(states: list[Any]) -> list[float]:
    return [float(i) for i in range(len(states))]


def test_examples_are_unique_and_routed() -> None:
    """P61: two environments that both number from 0."""
    group = EnvGroup([env("a"), env("b", system_prompt="sys")])
    rows = group.eval_examples()

    assert [(row["env_id"], row["example_id"]) for row in rows] == [
        ("a", "a/0"),
        ("a", "a/1"),
        ("b", "b/0"),
        ("b", "b/1"),
    ]
    assert rows[2]["prompt"][0]["content"] == "sys"


async def test_rollouts_go_to_their_environment(stub: ModelStub) -> None:
    group = EnvGroup([env("a", rubric=Rubric([lambda: 0.25])), env("b")], env_names=["x", "y"])

    outputs = [await group.run_rollout(row, stub.config(), "m") for row in group.eval_examples()]

    assert [output["reward"] for output in outputs] == [0.25, 0.25, 1.0, 1.0]
    assert [output["env_id"] for output in outputs] == ["x", "x", "y", "y"]
    assert [output["example_id"] for output in outputs] == ["x/0", "x/1", "y/0", "y/1"]


async def test_groups_nest(stub: ModelStub) -> None:
    inner = EnvGroup([env("a"), env("b")], env_id="inner")
    outer = EnvGroup([inner, env("c")])
    rows = outer.eval_examples()

    assert [row["env_id"] for row in rows] == ["inner/a", "inner/a", "inner/b", "inner/b", "c", "c"]
    outputs = [await outer.run_rollout(row, stub.config(), "m") for row in rows]
    assert [output["env_id"] for output in outputs] == [row["env_id"] for row in rows]
    assert [output["answer"] for output in outputs] == ["a", "a", "b", "b", "c", "c"]
    assert all(output["error"] is None for output in outputs)


async def test_group_scoring_in_a_mixture(stub: ModelStub) -> None:
    stub.answer = lambda request: completion("x")
    group = EnvGroup([env("a"), env("b", rubric=Rubric([ranked]))])
    rows = group.eval_examples()

    assert group.requires_group_rollouts
    outputs = await group.run_group([rows[2]] * 3, stub.config(), "m")
    assert [output["reward"] for output in outputs] == [0.0, 1.0, 2.0]
    assert [output["reward"] for output in await group.run_group([rows[0]] * 2, stub.config(), "m")] == [1.0, 1.0]
    assert await group.run_group([], stub.config(), "m") == []
    with pytest.raises(UsageError, match="run_group"):
        await group.run_rollout(rows[2], stub.config(), "m")
    with pytest.raises(UsageError, match="same environment"):
        await group.run_group([rows[0], rows[2]], stub.config(), "m")


async def test_inputs_of_nobody_are_refused() -> None:
    with pytest.raises(UsageError, match="none of this group's"):
        await EnvGroup([env("a")]).run_rollout({"prompt": [], "example_id": 0}, None, "m")


async def test_close_settings_and_rubrics_reach_every_environment() -> None:
    children = [env("a"), env("b")]
    group = EnvGroup(children)
    group.set_kwargs(timeout_seconds=4.0)
    group.add_rubric(Rubric([ranked]))
    await group.close()
    await group.close()

    assert [child.closed for child in children] == [1, 1]
    assert [child.timeout_seconds for child in children] == [4.0, 4.0]
    assert all(child.requires_group_rollouts for child in children)


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", "b/c"], ["a", ""]])
def test_names_must_be_usable(names: list[str]) -> None:
    with pytest.raises(UsageError):
        EnvGroup([env("a"), env("b")], env_names=names)


def test_default_names() -> None:
    assert list(EnvGroup([env("a"), env("a")]).envs) == ["env_0", "env_1"]
    assert list(EnvGroup([env("owner/a"), env("b")]).envs) == ["a", "b"]
    with pytest.raises(UsageError):
        EnvGroup([])


def test_training_rows_come_from_environments_that_have_some() -> None:
    only_eval = SingleTurnEnv(eval_dataset=[{"question": "q"}])
    group = EnvGroup([env("a", 1), only_eval], env_names=["a", "e"])

    assert [row["env_id"] for row in group.get_dataset()] == ["a"]
    assert [row["env_id"] for row in group.get_eval_dataset()] == ["a", "e"]
