"""Stages, hooks, failures, cancel, timeouts, retries and groups, mostly without a model."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from envbus.environments import Environment, Rubric, State, cleanup, running, stop, teardown
from envbus.errors import InfraError, UsageError
from envbus.types import RolloutInput

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(8)]


class ScriptedEnv(Environment):
    """Runs ``act(state)`` instead of a model."""

    def __init__(self, act: Callable[[State], Any] | None = None, **settings: Any) -> None:
        self.log: list[str] = []
        self.act = act
        self.setup_error: Exception | None = None
        self.cleanup_error: Exception | None = None
        super().__init__(dataset=ROWS, **settings)

    async def rollout(self, input: RolloutInput, client: Any, model: str, sampling_args: Any = None) -> State:
        state = self.init_state(input, client, model, sampling_args)
        await self.run_stages(state, self._generate)
        return state

    async def setup_state(self, state: State) -> None:
        self.log.append("setup")
        if self.setup_error:
            raise self.setup_error

    async def _generate(self, state: State) -> None:
        self.log.append("generate")
        if self.act:
            result = self.act(state)
            if asyncio.iscoroutine(result):
                await result

    @cleanup(priority=5)
    async def first_cleanup(self, state: State) -> None:
        if self.cleanup_error:
            raise self.cleanup_error

    @cleanup
    async def second_cleanup(self, state: State) -> None:
        await asyncio.sleep(0)
        self.log.append("cleanup")

    @teardown
    def shut(self) -> None:
        self.log.append("teardown")
        raise RuntimeError("teardown failed")


def one(state: State) -> float:
    return 1.0


async def run(env: Environment, row: int = 0, **settings: Any) -> dict[str, Any]:
    return dict(await env.run_rollout(env.eval_examples()[row], None, "m", **settings))


def boom(error: BaseException) -> Callable[..., Any]:
    def act(state: State) -> None:
        raise error

    return act


async def test_a_good_rollout_has_every_field() -> None:
    env = ScriptedEnv(rubric=Rubric([one]))

    output = await run(env, 3, state_columns=["input", "nothing"])

    assert env.log == ["setup", "generate", "cleanup"]
    assert output["reward"] == 1.0
    assert output["metrics"] == {"one": 1.0}
    assert output["error"] is None
    assert (output["example_id"], output["answer"]) == (3, "3")
    assert output["input"]["question"] == "q3"
    assert output["nothing"] is None
    timing = output["timing"]
    assert timing["total_s"] == timing["setup_s"] + timing["generation_s"] + timing["scoring_s"]
    assert set(output) == {
        *("example_id", "prompt", "completion", "answer", "info", "reward", "advantage", "metrics", "timing"),
        *("is_completed", "is_truncated", "stop_condition", "error", "trajectory", "token_usage", "tool_defs"),
        *("input", "nothing"),
    }


@pytest.mark.parametrize("stage", ["setup", "generate", "score", "cleanup", "rubric cleanup", "rollout", "no state"])
async def test_a_failure_at_any_stage_is_an_output_without_reward(stage: str) -> None:
    """P02, P16: never an exception, never a reward of 0."""

    def grader(state: State) -> float:
        if stage == "score":
            raise RuntimeError("broken")
        return 1.0

    class CleaningRubric(Rubric):
        @cleanup
        def clean(self, state: State) -> None:
            if stage == "rubric cleanup":
                raise RuntimeError("broken")

    class OwnRolloutEnv(ScriptedEnv):
        async def rollout(self, *args: Any) -> Any:
            if stage == "rollout":
                raise RuntimeError("broken")
            return None if stage == "no state" else await super().rollout(*args)

    act = boom(RuntimeError("broken")) if stage == "generate" else None
    env = OwnRolloutEnv(act, rubric=CleaningRubric([grader]))
    env.setup_error = RuntimeError("broken") if stage == "setup" else None
    env.cleanup_error = RuntimeError("broken") if stage == "cleanup" else None

    output = await run(env)

    assert output["reward"] is None
    assert "broken" in output["error"]["error_chain_repr"] or stage == "no state"
    assert output["error"]["error"] == {"score": "ScoringError", "no state": "RolloutError"}.get(stage, "RuntimeError")
    assert output["example_id"] == 0
    assert stage in ("rollout", "no state") or env.log.count("cleanup") == 1


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_exit_and_leaked_cancel_in_environment_code_are_failures(error: BaseException) -> None:
    output = await run(ScriptedEnv(boom(error), rubric=Rubric([one])))

    assert type(error).__name__ in output["error"]["error_chain_str"]


@pytest.mark.parametrize("as_group", [False, True])
async def test_cancel_runs_cleanup_and_awaits_it(as_group: bool) -> None:
    """P06 kind: the canceller sees everything finished, cleanup included."""
    started, running = asyncio.Event(), 0

    async def act(state: State) -> None:
        nonlocal running
        running += 1
        if running == (3 if as_group else 1):
            started.set()
        try:
            await asyncio.Event().wait()
        finally:
            running -= 1

    env = ScriptedEnv(act, rubric=Rubric([one]))
    inputs = list(env.eval_examples()[:3])
    call = env.run_group(inputs, None, "m") if as_group else env.run_rollout(inputs[0], None, "m")
    task = asyncio.create_task(call)  # type: ignore[arg-type]
    await started.wait()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert running == 0
    assert env.log.count("cleanup") == (3 if as_group else 1)
    assert len(asyncio.all_tasks()) == 1


async def test_a_second_cancel_does_not_cut_cleanup_short() -> None:
    cleaning, go_on, cleaned = asyncio.Event(), asyncio.Event(), False

    class SlowCleanupEnv(ScriptedEnv):
        @cleanup(priority=9)
        async def slow(self, state: State) -> None:
            nonlocal cleaned
            cleaning.set()
            await go_on.wait()
            cleaned = True

    env = SlowCleanupEnv(rubric=Rubric([one]))
    task = asyncio.create_task(run(env))
    await cleaning.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert cleaned
    assert env.log.count("cleanup") == 1


async def test_cleanup_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "CLEANUP_LIMIT_S", 0.05)

    class HangingEnv(ScriptedEnv):
        @cleanup
        async def hang(self, state: State) -> None:
            await asyncio.Event().wait()

    output = await run(HangingEnv(rubric=Rubric([one])))

    assert output["error"]["error"] == "TimeoutError"


async def test_the_time_limit_ends_generation_and_keeps_cleanup() -> None:
    env = ScriptedEnv(lambda state: asyncio.Event().wait(), rubric=Rubric([one]), timeout_seconds=0.05)

    output = await run(env)

    assert output["error"]["error"] == "RolloutTimeoutError"
    assert output["stop_condition"] == "timeout_reached"
    assert output["reward"] is None
    assert env.log == ["setup", "generate", "cleanup"]


async def test_the_time_limit_covers_scoring_too() -> None:
    async def hang(state: State) -> float:
        await asyncio.Event().wait()
        return 1.0

    output = await run(ScriptedEnv(rubric=Rubric([hang]), timeout_seconds=0.05))

    assert output["error"]["error"] == "RolloutTimeoutError"
    assert "scoring" in output["error"]["error_chain_repr"]


async def test_a_timeout_of_the_environments_own_is_not_ours() -> None:
    output = await run(ScriptedEnv(boom(TimeoutError("mine")), timeout_seconds=5))

    assert output["error"]["error"] == "TimeoutError"


@pytest.mark.usefixtures("quick_retries")
async def test_retries_cover_infra_errors_with_a_fresh_state_each() -> None:
    seen: list[int] = []

    def act(state: State) -> None:
        seen.append(id(state))
        state["n"] = state.get("n", 0) + 1
        if len(seen) < 3:
            raise RuntimeError("wrapped") from InfraError("hiccup")

    env = ScriptedEnv(act, rubric=Rubric([one]))
    output = await run(env, max_retries=2, state_columns=["n"])

    assert output["reward"] == 1.0
    assert output["n"] == 1
    assert env.log == ["setup", "generate", "cleanup"] * 3


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(("error", "tries"), [(InfraError("x"), 3), (RuntimeError("x"), 1)])
async def test_retries_are_bounded_and_only_for_retryable_errors(error: Exception, tries: int) -> None:
    env = ScriptedEnv(boom(error), rubric=Rubric([one]))

    output = await run(env, max_retries=2)

    assert env.log.count("generate") == tries
    assert output["error"]["error"] == type(error).__name__


@pytest.mark.usefixtures("quick_retries")
async def test_infra_error_in_scoring_is_tried_again() -> None:
    calls = 0

    def grader(state: State) -> float:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise InfraError("sandbox gone")
        return 0.5

    env = ScriptedEnv(rubric=Rubric([grader]))

    assert (await run(env, max_retries=1))["reward"] == 0.5
    assert env.log.count("generate") == 2


async def test_a_group_keeps_its_order_and_its_survivors() -> None:
    """P31: eight outputs for eight inputs; the failed member keeps its error and is not ranked."""

    def act(state: State) -> None:
        if state["answer"] == "3":
            raise RuntimeError("member 3")

    def rank(states: list[State]) -> list[float]:
        return [float(i) for i, _ in enumerate(states)]

    env = ScriptedEnv(act, rubric=Rubric([one, rank]))
    outputs = await env.run_group(list(env.eval_examples()), None, "m")

    assert [output["example_id"] for output in outputs] == list(range(8))
    assert [output["reward"] for output in outputs] == [1.0, 2.0, 3.0, None, 4.0, 5.0, 6.0, 7.0]
    assert outputs[3]["error"]["error"] == "RuntimeError"
    assert [output["advantage"] for output in outputs] == [-3.0, -2.0, -1.0, None, 0.0, 1.0, 2.0, 3.0]


async def test_group_members_run_at_the_same_time() -> None:
    """P36: rollouts of one process overlap."""
    arrived: list[State] = []
    everyone = asyncio.Event()

    async def act(state: State) -> None:
        arrived.append(state)
        if len(arrived) == 8:
            everyone.set()
        async with asyncio.timeout(20):
            await everyone.wait()

    env = ScriptedEnv(act, rubric=Rubric([one]))
    outputs = await env.run_group(list(env.eval_examples()), None, "m")

    assert all(output["error"] is None for output in outputs)


async def test_one_grader_failure_in_a_group_hurts_nobody_else() -> None:
    """P02: the grader raises in 1 of 4."""

    def grader(answer: str) -> float:
        return 1 / int(answer)

    outputs = await (env := ScriptedEnv(rubric=Rubric([grader]))).run_group(list(env.eval_examples()[:4]), None, "m")

    assert [output["reward"] for output in outputs] == [None, 1.0, 0.5, 1 / 3]
    assert outputs[0]["error"]["error_chain_str"] == "ScoringError -> ZeroDivisionError"


@pytest.mark.parametrize(
    "ranking", [lambda states: [1.0], lambda states: 5, lambda states: 1 / 0], ids=["short", "no list", "raises"]
)
async def test_a_group_function_that_fails_fails_every_member(ranking: Any) -> None:
    env = ScriptedEnv(rubric=Rubric([ranking]))

    outputs = await env.run_group(list(env.eval_examples()[:3]), None, "m")

    assert [(output["reward"], output["error"]["error"]) for output in outputs] == [(None, "ScoringError")] * 3


async def test_empty_and_all_failed_groups() -> None:
    env = ScriptedEnv(boom(ValueError("x")), rubric=Rubric([lambda states: [1.0 / 0]]))

    assert await env.run_group([], None, "m") == []
    outputs = await env.run_group(list(env.eval_examples()[:2]), None, "m")
    assert [output["error"]["error"] for output in outputs] == ["ValueError", "ValueError"]


async def test_group_rewards_refuse_run_rollout() -> None:
    env = ScriptedEnv(rubric=Rubric([lambda states: [1.0]]))

    assert env.requires_group_rollouts
    with pytest.raises(UsageError, match="run_group"):
        await run(env)


async def test_non_finite_rewards_pass_and_numpy_becomes_float() -> None:
    assert math.isnan((await run(ScriptedEnv(rubric=Rubric([lambda: math.nan]))))["reward"])
    output = await run(ScriptedEnv(rubric=Rubric([lambda: np.float32(0.5)])))
    assert type(output["reward"]) is float
    env = ScriptedEnv(rubric=Rubric([lambda answer: math.inf if answer == "0" else float(answer)]))
    outputs = await env.run_group(list(env.eval_examples()[:3]), None, "m")
    assert [(output["reward"], output["advantage"]) for output in outputs] == [(math.inf, None), (1, -0.5), (2, 0.5)]


async def test_an_output_that_cannot_be_encoded_is_a_failed_output() -> None:
    """P04, P16: the state column refers to too deep a structure; the rollout is told failed, not lost."""
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]

    output = await run(ScriptedEnv(lambda state: state.update(deep=deep), rubric=Rubric([one])), state_columns=["deep"])

    assert output["error"]["error"] == "EncodeError"
    assert "deep" in output["error"]["error_chain_repr"]
    assert (output["example_id"], output["reward"]) == (0, None)


async def test_rollouts_do_not_share_the_example() -> None:
    env = ScriptedEnv(lambda state: state["info"].setdefault("seen", []).append(1), rubric=Rubric([one]))
    row: Any = {"prompt": [], "example_id": 0, "info": {"seen": []}}

    outputs = await env.run_group([row, row], None, "m")

    assert [output["info"] for output in outputs] == [{"seen": [1]}] * 2
    assert row["info"] == {"seen": []}


@pytest.mark.parametrize(
    "row",
    [{"prompt": 5}, {"prompt": "p", "info": "{no json"}, {"prompt": "p", "lock": threading.Lock()}],
    ids=["prompt", "info", "column"],
)
async def test_an_input_of_no_use_is_a_failed_output(row: Any) -> None:
    env = ScriptedEnv(rubric=Rubric([one]))

    output, other = await env.run_group([{**row, "example_id": 9}, *env.eval_examples()[:1]], None, "m")

    assert output["error"] is not None
    assert (output["example_id"], output["prompt"], output["reward"]) == (9, row["prompt"], None)
    assert other["reward"] == 1.0


async def test_close_runs_teardown_once_even_if_it_raises() -> None:
    env = ScriptedEnv()

    await env.close()
    await env.close()

    assert env.log == ["teardown"]


async def test_stop_conditions_are_asked_by_priority() -> None:
    class StoppingEnv(ScriptedEnv):
        @stop
        async def a_late(self, state: State) -> bool:
            return True

        @stop(priority=1)
        def z_early(self, state: State) -> bool:
            return bool(state.get("early"))

    env = StoppingEnv()
    state = env.init_state(env.eval_examples()[0], None, "m")
    assert await env.is_completed(state)
    assert state["stop_condition"] == "a_late"
    state["early"] = True
    await env.is_completed(state)
    assert state["stop_condition"] == "z_early"


def test_set_kwargs_knows_its_settings() -> None:
    env = ScriptedEnv()

    env.set_kwargs(timeout_seconds=3.0)
    assert env.timeout_seconds == 3.0
    with pytest.raises(UsageError, match=r"timeout_secs.*timeout_seconds"):
        env.set_kwargs(timeout_secs=1)
    with pytest.raises(UsageError):
        env.set_kwargs(_closed=True)


async def test_text_errors_set_by_the_environment_count() -> None:
    output = await run(ScriptedEnv(lambda state: state.update(error="gave up"), rubric=Rubric([one])))

    assert output["error"]["error"] == "RolloutError"
    assert "gave up" in output["error"]["error_chain_repr"]
