"""How an environment's rollouts run: stages, retries, scoring, alone or as a group. Failures end up in the state."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envbus.environments.hooks import find_hooks, settled
from envbus.environments.model_client import resolve_client
from envbus.environments.progress import position
from envbus.environments.rollout_output import rollout_output
from envbus.environments.stages import CLEANUP_LIMIT_S, capture_errors, finish, limited, retrying
from envbus.environments.state import State, new_state
from envbus.errors import RolloutError, RolloutTimeoutError, ScoringError, UsageError
from envbus.types import RolloutInput, RolloutOutput, SamplingArgs

if TYPE_CHECKING:
    from envbus.environments.environment import Environment


@dataclass(frozen=True, slots=True)
class Call:
    """What run_rollout and run_group are given beside the inputs."""

    client: Any
    model: str
    sampling_args: SamplingArgs | None = None
    max_retries: int = 0
    state_columns: list[str] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As run_rollout and run_group take them."""
        return self.client, self.model, self.sampling_args, self.max_retries, self.state_columns


async def run_rollout(env: Environment, input: RolloutInput, call: Call) -> RolloutOutput:
    """Generate and score one rollout, both again after a retryable failure."""
    if env.requires_group_rollouts:
        raise UsageError("the rubric has group reward functions: use run_group or evaluate, not run_rollout")
    client = resolve_client(call.client)

    async def attempt() -> State:
        state = await _generated(env, input, client, call)
        await _score(env, [state], lambda alive: env.rubric.score_rollout(alive[0]))
        return state

    state: State = await retrying(call.max_retries)(attempt)
    return rollout_output(state, call.state_columns)


async def run_group(env: Environment, inputs: list[RolloutInput], call: Call) -> list[RolloutOutput]:
    """Generate rollouts at the same time, each again after a retryable failure, and score the survivors together."""
    client = resolve_client(call.client)

    async def member(place: int, input: RolloutInput) -> State:
        position.set(place)  # in the context of its own task
        state: State = await retrying(call.max_retries)(_generated, env, input, client, call)
        return state

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(member(place, input)) for place, input in enumerate(inputs)]
    states = [task.result() for task in tasks]
    await _score(env, states, env.rubric.score_group)
    _set_advantages([state for state in states if state["error"] is None])
    return [rollout_output(state, call.state_columns) for state in states]


async def run_stages(env: Environment, state: State, generate: Callable[[State], Awaitable[None]]) -> None:
    """Setup and generation within the environment's time limit, then its cleanup hooks, whatever happened."""
    try:
        with capture_errors(state):
            await limited(_set_up_and_generate(env, state, generate), what="the rollout", limit_s=env.timeout_seconds)
        if state["error"] is not None:
            timed_out = isinstance(state["error"], RolloutTimeoutError)
            state["stop_condition"] = "timeout_reached" if timed_out else "has_error"
    finally:
        with capture_errors(state):
            await finish(_clean_up(env, state), limit_s=CLEANUP_LIMIT_S)


async def _generated(env: Environment, input: RolloutInput, client: Any, call: Call) -> State:
    outcome: State = {"error": None}
    with capture_errors(outcome):
        state = await env.rollout(input, client, call.model, call.sampling_args)
        if not isinstance(state, dict) or "timing" not in state:
            raise RolloutError("rollout() must return the state that init_state made")
        return state
    given = {name: input.get(name) for name in ("prompt", "info")}
    row = {name: input[name] for name in ("example_id", "env_id", "answer") if name in input}
    return {**new_state(row), **given, "error": outcome["error"], "stop_condition": "has_error"}


async def _set_up_and_generate(env: Environment, state: State, generate: Callable[[State], Awaitable[None]]) -> None:
    await _timed(state, "setup_s", settled(env.setup_state(state)))
    await _timed(state, "generation_s", generate(state))


async def _clean_up(env: Environment, state: State) -> None:
    for hook in find_hooks(env, "cleanup"):
        with capture_errors(state):
            await settled(hook(state))


async def _score(
    env: Environment, states: list[State], scoring: Callable[[list[State]], Coroutine[Any, Any, None]]
) -> None:
    alive = [state for state in states if state["error"] is None]
    if not alive:
        return
    started = time.perf_counter()
    try:
        with capture_errors(*alive):
            await limited(scoring(alive), what="scoring", limit_s=env.timeout_seconds)
        for state in alive:
            with capture_errors(state):
                _check_reward(state)
    finally:
        for state in alive:
            state["timing"]["scoring_s"] = time.perf_counter() - started
        with capture_errors(*alive):
            await finish(_clean_up_scoring(env, alive), limit_s=CLEANUP_LIMIT_S)


def _check_reward(state: State) -> None:
    if state["error"] is None and not isinstance(state["reward"], float):
        raise ScoringError(f"the rubric left {type(state['reward']).__name__} as the reward, not a float")


async def _clean_up_scoring(env: Environment, states: list[State]) -> None:
    for state in states:
        with capture_errors(state):
            await env.rubric.cleanup(state)


def _set_advantages(states: list[State]) -> None:
    """Reward minus the group's mean, over members that have a finite reward; None for the others."""
    finite = [state for state in states if math.isfinite(state["reward"])]
    for state in finite:
        state["advantage"] = state["reward"] - math.fsum(member["reward"] for member in finite) / len(finite)
    for state in states:
        for step in state["trajectory"]:
            for name in ("reward", "advantage"):
                if step.get(name) is None:
                    step[name] = state[name]


async def _timed(state: State, name: str, work: Awaitable[None]) -> None:
    started = time.perf_counter()
    try:
        await work
    finally:
        state["timing"][name] = time.perf_counter() - started
