"""Hosts an environment of verifiers 0.1.x: its own run_rollout and run_group, with our model clients.

Outputs are the library's own. What ends with a call or with the server, and does not by itself, is ended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from envbus.adapters.verifiers.classic_clients import ClassicClients
from envbus.adapters.verifiers.classic_examples import ClassicExamples
from envbus.adapters.verifiers.classic_members import members_end_with_call, watch_members
from envbus.types import RolloutInput, RolloutOutput, SamplingArgs

_BASE = ("verifiers.envs.environment", "Environment")


def is_classic(environment: object) -> bool:
    """Whether this is an environment of verifiers 0.1.x, as its classes tell."""
    return any((each.__module__, each.__qualname__) == _BASE for each in type(environment).__mro__)


class ClassicHost:
    """The hosting protocol for a verifiers 0.1.x environment.

    Args:
        environment: As load_environment returned it; its ``rollout`` is watched from now on.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._all = tuple(_with_members(environment))
        self._clients = ClassicClients()
        self._requires_groups: bool | None = None
        for each in self._all:
            watch_members(each)

    @property
    def requires_group_rollouts(self) -> bool:
        """Whether a reward function of it, or of an environment in it, needs all rollouts of an example."""
        if self._requires_groups is None:
            self._requires_groups = any(_requires_groups(each) for each in self._all)
        return self._requires_groups

    def eval_examples(self) -> ClassicExamples:
        """The eval set, or the train set where there is none; the library builds it when it is first asked for."""
        return ClassicExamples(self._environment.get_eval_dataset())

    def set_kwargs(self, **settings: Any) -> None:
        """Set attributes, through the environment's setters where it has some."""
        self._environment.set_kwargs(**settings)
        self._requires_groups = None

    def set_concurrency(self, max_concurrent: int) -> None:
        """Size the library's thread pools, the event loop's among them."""
        if callable(set_concurrency := getattr(self._environment, "set_concurrency", None)):
            set_concurrency(max_concurrent)

    async def run_rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
    ) -> RolloutOutput:
        """Run and score one rollout; raises what the environment raises."""
        output: RolloutOutput = await self._environment.run_rollout(
            input,
            self._clients.get(client),
            model,
            self._sampling(sampling_args),
            max_retries=max_retries,
            state_columns=state_columns,
        )
        return output

    async def run_group(
        self,
        group_inputs: list[RolloutInput],
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
    ) -> list[RolloutOutput]:
        """Run rollouts of one example and score them together; raises what the first to fail raises."""
        async with members_end_with_call():
            outputs: list[RolloutOutput] = await self._environment.run_group(
                group_inputs,
                self._clients.get(client),
                model,
                self._sampling(sampling_args),
                max_retries=max_retries,
                state_columns=state_columns,
            )
        return outputs

    async def close(self) -> None:
        """Run the teardown hooks of all environments in it, once: the library's exit hooks find nothing to do."""
        teardowns = [each._teardown for each in self._all]
        for each in self._all:
            each._teardown = _torn_down
        ended = await asyncio.gather(*(teardown() for teardown in teardowns), return_exceptions=True)
        if errors := [each for each in ended if isinstance(each, BaseException)]:
            raise BaseExceptionGroup("teardown hooks failed", errors)

    def _sampling(self, given: SamplingArgs | None) -> SamplingArgs:
        """As the library's own generate() puts them together."""
        return {**deepcopy(self._environment.sampling_args), **(given or {})}


def _with_members(environment: Any) -> Iterator[Any]:
    """An environment and those in it, an EnvGroup's, each once."""
    seen: set[int] = set()
    waiting = [environment]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and is_classic(each):
            seen.add(id(each))
            yield each
            members = getattr(each, "envs", ())
            waiting += members if isinstance(members, list | tuple) else ()


def _requires_groups(environment: Any) -> bool:
    if hasattr(environment, "requires_group_rollouts"):
        return bool(environment.requires_group_rollouts)
    return _has_group_rewards(environment.rubric)  # 0.1.10 asks only when it scores


def _has_group_rewards(rubric: Any) -> bool:
    return bool(rubric._get_group_reward_funcs()) or any(map(_has_group_rewards, getattr(rubric, "rubrics", ())))


async def _torn_down() -> None:
    """In place of a teardown that has run."""
