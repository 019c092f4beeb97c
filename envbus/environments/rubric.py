"""Rubric: weighted reward functions over one rollout or a group. A function that raises is an error, never a 0."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any, get_origin

from envbus.environments.hooks import call_named, find_hooks, signature_of
from envbus.environments.parsers import Parser
from envbus.environments.stages import capture_errors
from envbus.environments.state import State
from envbus.errors import ScoringError, UsageError
from envbus.types import RewardFunc

logger = logging.getLogger(__name__)

GROUP_PARAMETERS = frozenset({"states", "prompts", "completions", "answers", "infos"})


class Rubric:
    """Scores rollouts with a weighted sum of reward functions.

    A reward function is called with the arguments that its parameters name: ``prompt``, ``completion``, ``answer``,
    ``info``, ``state``, ``parser``, further columns of the example, and class objects; with ``**kwargs`` it gets all.
    It returns one number. A *group* function names ``states``, ``prompts``, ``completions``, ``answers`` or ``infos``,
    or is annotated to return a list; it sees all rollouts of an example and returns one number for each.
    Sync or async; plain functions run on the event loop. Weight 0 makes a function a metric.
    """

    def __init__(
        self,
        funcs: Iterable[RewardFunc] | None = None,
        weights: Iterable[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        self.funcs: list[RewardFunc] = list(funcs or [])
        self.weights: list[float] = [1.0] * len(self.funcs) if weights is None else [float(w) for w in weights]
        if len(self.weights) != len(self.funcs):
            raise UsageError(f"a Rubric of {len(self.funcs)} functions needs as many weights, not {len(self.weights)}")
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a reward function."""
        self.funcs.append(func)
        self.weights.append(float(weight))

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """Add a function that is reported but, with weight 0, does not count toward the reward."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Make ``value`` available to functions that name it as a parameter."""
        self.class_objects[name] = value

    @property
    def has_group_rewards(self) -> bool:
        """Whether some function needs all rollouts of an example together."""
        return any(is_group_function(func) for func in self.funcs)

    async def score_rollout(self, state: State) -> None:
        """Set the state's ``reward`` and ``metrics`` from the individual functions.

        Raises:
            ScoringError: A function raised or did not return a number.
        """
        state["reward"], state["metrics"] = 0.0, {}
        for func, weight in self._weighted(group=False):
            score = _number(func, await _called(func, self._objects(state)))
            _add(state, func, score, weight)

    async def score_group(self, states: list[State]) -> None:
        """Score rollouts of one example together: individual functions first, then the group functions.

        A rollout whose individual scoring fails gets that error and is left out of the group functions.
        """
        async with asyncio.TaskGroup() as tasks:
            for state in states:
                tasks.create_task(self._score_member(state))
        scored = [state for state in states if state["error"] is None]
        for func, weight in self._weighted(group=True):
            if scored:
                await self._score_together(func, weight, scored)

    async def cleanup(self, state: State) -> None:
        """Run the rubric's cleanup hooks for one rollout, after its scoring."""
        for hook in find_hooks(self, "cleanup"):
            await call_named(hook, self._objects(state))

    async def teardown(self) -> None:
        """Run the rubric's teardown hooks."""
        for hook in find_hooks(self, "teardown"):
            await call_named(hook, self.class_objects)

    async def _score_member(self, state: State) -> None:
        with capture_errors(state):
            await self.score_rollout(state)

    async def _score_together(self, func: RewardFunc, weight: float, states: list[State]) -> None:
        values = await _called(func, self._group_objects(states))
        try:
            scores = list(values)
        except TypeError as error:
            raise ScoringError(f"group reward function {_name(func)} returned {type(values).__name__}") from error
        if len(scores) != len(states):
            raise ScoringError(
                f"group reward function {_name(func)} returned {len(scores)} rewards for {len(states)} rollouts"
            )
        for state, value in zip(states, scores, strict=True):
            with capture_errors(state):
                _add(state, func, _number(func, value), weight)

    def _weighted(self, *, group: bool) -> list[tuple[RewardFunc, float]]:
        pairs = zip(self.funcs, self.weights, strict=True)
        return [(func, weight) for func, weight in pairs if is_group_function(func) is group]

    def _objects(self, state: State) -> dict[str, Any]:
        row: Mapping[str, Any] = state.get("input") or {}
        return {
            **row,
            **{name: state.get(name) for name in ("prompt", "completion", "answer", "info")},
            "state": state,
            **self.class_objects,
        }

    def _group_objects(self, states: list[State]) -> dict[str, Any]:
        columns = ("prompt", "completion", "answer", "info")
        return {
            **{f"{name}s": [state.get(name) for state in states] for name in columns},
            "states": states,
            **self.class_objects,
        }


class RubricGroup(Rubric):
    """Several rubrics as one: their rewards add up, their metrics are merged."""

    def __init__(self, rubrics: Iterable[Rubric]) -> None:
        super().__init__()
        self.rubrics = list(rubrics)

    @property
    def has_group_rewards(self) -> bool:
        """Whether some rubric has a group function."""
        return any(rubric.has_group_rewards for rubric in self.rubrics)

    async def score_rollout(self, state: State) -> None:
        """Score with each rubric in turn."""
        reward, metrics = 0.0, {}
        for rubric in self.rubrics:
            await rubric.score_rollout(state)
            reward += state["reward"]
            metrics.update(state["metrics"])
        state["reward"], state["metrics"] = reward, metrics

    async def score_group(self, states: list[State]) -> None:
        """Score with each rubric in turn; a rollout that failed in one is left out of the next."""
        sums: dict[int, tuple[float, dict[str, float]]] = {id(state): (0.0, {}) for state in states}
        for rubric in self.rubrics:
            scored = [state for state in states if state["error"] is None]
            if scored:
                await rubric.score_group(scored)
            for state in (state for state in scored if state["error"] is None):
                reward, metrics = sums[id(state)]
                sums[id(state)] = (reward + state["reward"], {**metrics, **state["metrics"]})
        for state in states:
            state["reward"], state["metrics"] = sums[id(state)]

    async def cleanup(self, state: State) -> None:
        """Run the cleanup hooks of every rubric."""
        for rubric in self.rubrics:
            await rubric.cleanup(state)

    async def teardown(self) -> None:
        """Run the teardown hooks of every rubric, also when one of them fails."""
        results = await asyncio.gather(*(rubric.teardown() for rubric in self.rubrics), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result


def is_group_function(func: RewardFunc) -> bool:
    """Whether a reward function scores all rollouts of an example at once."""
    signature = signature_of(func)
    returns = signature.return_annotation
    returns_list = (
        returns.lower().startswith("list") if isinstance(returns, str) else list in (returns, get_origin(returns))
    )
    return returns_list or not GROUP_PARAMETERS.isdisjoint(signature.parameters)


async def _called(func: RewardFunc, objects: dict[str, Any]) -> Any:
    try:
        return await call_named(func, objects)
    except ScoringError:
        raise
    except Exception as error:
        raise ScoringError(f"reward function {_name(func)} raised {type(error).__name__}") from error


def _number(func: RewardFunc, value: Any) -> float:
    # numpy and torch scalars know how to become a Python number; arrays with several elements raise here.
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, Real | Decimal):
            return float(plain)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ScoringError(f"reward function {_name(func)} returned a {type(value).__name__}, not a number") from error
    raise ScoringError(f"reward function {_name(func)} returned a {type(value).__name__}, not a number")


def _add(state: State, func: RewardFunc, score: float, weight: float) -> None:
    state["metrics"][_name(func)] = score
    # A metric of weight 0 must not make the reward NaN when it is not finite itself.
    if weight:
        state["reward"] += score * weight


def _name(func: RewardFunc) -> str:
    return str(getattr(func, "__name__", type(func).__name__))
