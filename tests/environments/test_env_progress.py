"""Progress of rollouts in this process: each turn of a dialogue, members of groups, and what needs no listener."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from env_model_stub import ModelStub

from envbus.environments import EnvGroup, MultiTurnEnv, Rubric, State, progress
from envbus.errors import EncodeError
from envbus.evaluation import EvalCallbacks
from envbus.types import Messages, RolloutProgress

ROWS = [{"question": "Go on.", "answer": "3", "example_id": 7}]


class Dialogue(MultiTurnEnv):
    """Ends with a word of its own after so many turns."""

    def __init__(self, *, turns: int = 3, group: bool = False) -> None:
        rubric = Rubric([ranks] if group else [lambda: 1.0])
        super().__init__(dataset=ROWS, rubric=rubric)
        self.turns = turns

    async def env_response(self, messages: Messages, state: State) -> Any:
        if state["turn"] == self.turns:
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
            return []
        return f"go on {state['turn']}"


class Rewriting(Dialogue):
    """Its prompts do not go on from the dialogue."""

    async def get_prompt_messages(self, state: State) -> Messages:
        prompt = await super().get_prompt_messages(state)
        return [{"role": "user", "content": f"turn {state['turn']}"}, *prompt[1:2]]


def ranks(states: list[State]) -> list[float]:
    return [float(place) for place in range(len(states))]


def row(env: MultiTurnEnv | EnvGroup) -> Any:
    return env.eval_examples()[0]


async def test_each_turn_is_reported_with_its_new_messages(stub: ModelStub) -> None:
    heard: list[RolloutProgress] = []
    env = Dialogue()
    output = await env.run_rollout(row(env), stub.config(), "m", on_progress=heard.append)
    assert [(each.attempt, each.number) for each in heard] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert [each.data["turn"] for each in heard] == [1, 2, 3, 3]
    assert {(each.data["example_id"], each.data["position"]) for each in heard} == {(7, 0)}
    assert [message for each in heard for message in each.data["messages"]] == output["completion"]
    assert output["completion"][-1]["content"] == "bye"


async def test_a_prompt_that_does_not_go_on_is_new_as_a_whole(stub: ModelStub) -> None:
    heard: list[RolloutProgress] = []
    env = Rewriting(turns=2)
    await env.run_rollout(row(env), stub.config(), "m", on_progress=heard.append)
    assert [message["content"] for message in heard[1].data["messages"]][:1] == ["turn 1"]


async def test_members_of_a_group_are_told_apart(stub: ModelStub) -> None:
    heard: list[RolloutProgress] = []
    env = Dialogue(group=True)
    outputs = await env.run_group([row(env)] * 3, stub.config(), "m", on_progress=heard.append)
    assert [each.number for each in heard] == list(range(1, 13))
    for position, output in enumerate(outputs):
        mine = [each.data for each in heard if each.data["position"] == position]
        assert [message for data in mine for message in data["messages"]] == output["completion"]


async def test_an_env_group_passes_it_on(stub: ModelStub) -> None:
    heard: list[RolloutProgress] = []
    env = EnvGroup([Dialogue(turns=1), Dialogue(turns=2)], ["a", "b"])
    await env.run_rollout(env.eval_examples()[1], stub.config(), "m", on_progress=heard.append)
    assert [(each.data["example_id"], each.data["turn"]) for each in heard] == [("b/7", 1), ("b/7", 2), ("b/7", 2)]


async def test_what_a_callback_raises_is_logged_and_changes_nothing(
    stub: ModelStub, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(progress: RolloutProgress) -> None:
        raise ValueError("not today")

    env = Dialogue()
    output = await env.run_rollout(row(env), stub.config(), "m", on_progress=broken)
    assert (output["reward"], output["error"]) == (1.0, None)
    assert "not today" in caplog.text


async def test_a_report_is_a_copy_in_plain_data() -> None:
    heard: list[RolloutProgress] = []
    own = {"messages": [{"role": "user", "content": "a"}], "pair": (1, 2)}
    with progress.reporting_here(heard.append):
        await progress.report(own)
    own["messages"].append({})  # type: ignore[union-attr]
    assert heard[0].data == {"messages": [{"role": "user", "content": "a"}], "pair": [1, 2]}


async def test_tasks_of_the_call_report_and_none_after_its_end() -> None:
    heard: list[RolloutProgress] = []
    over = asyncio.Event()

    async def late() -> bool:
        await progress.report({"n": 1})
        await over.wait()
        await progress.report({"n": 2})
        return progress.is_wanted()

    with progress.reporting_here(heard.append):
        task = asyncio.create_task(late())
        await asyncio.sleep(0)
        assert progress.is_wanted()
    over.set()
    assert not await task
    assert [each.data for each in heard] == [{"n": 1}]
    assert not progress.is_wanted()


async def test_without_a_listener_data_is_not_even_looked_at() -> None:
    class Unreadable(dict[str, Any]):
        def keys(self) -> Any:
            raise AssertionError("read")

    await progress.report(Unreadable())


async def test_data_that_cannot_travel_is_refused_here_as_on_the_bus() -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with progress.reporting_here(lambda each: None), pytest.raises(EncodeError):
        await progress.report({"deep": deep})


class Watching(EvalCallbacks):
    wants_progress = True

    def __init__(self) -> None:
        self.heard: list[tuple[int, Any]] = []

    def on_progress(self, position: int, progress: RolloutProgress | None) -> None:
        self.heard.append((position, None if progress is None else progress.data["turn"]))


@pytest.mark.parametrize(
    ("group", "heard"),
    [
        (False, [(0, 1), (0, 1), (0, None), (1, 1), (1, 1), (1, None)]),
        (True, [(0, 1), (0, 1), (0, 1), (0, 1), (0, None)]),
    ],
)
async def test_an_evaluation_passes_it_to_a_display_that_wants_it(
    stub: ModelStub, group: bool, heard: list[Any]
) -> None:
    callbacks = Watching()
    env = Dialogue(turns=1, group=group)
    await env.evaluate(
        stub.config(), "m", rollouts_per_example=2, max_concurrent=2 if group else 1, callbacks=callbacks
    )
    assert callbacks.heard == heard


async def test_an_evaluation_without_such_a_display_asks_for_none(stub: ModelStub) -> None:
    wanted: list[bool] = []

    class Asking(Dialogue):
        async def env_response(self, messages: Messages, state: State) -> Any:
            wanted.append(progress.is_wanted())
            return await super().env_response(messages, state)

    await Asking(turns=1).evaluate(stub.config(), "m", callbacks=EvalCallbacks())
    assert wanted == [False]


async def test_a_runner_that_knows_no_progress_is_not_given_any(stub: ModelStub) -> None:
    class Old:
        async def run_rollout(self, input: Any, client: Any, model: str, *settings: Any) -> Any:
            return {"example_id": input["example_id"], "reward": 0.5}

        async def run_group(self, inputs: Any, client: Any, model: str, *settings: Any) -> Any:
            return [await self.run_rollout(item, client, model) for item in inputs]

    env = Dialogue()
    env.env_client = Old()
    output = await env.run_rollout(row(env), stub.config(), "m", on_progress=lambda each: None)
    assert output["reward"] == 0.5
