"""Hosts a taskset of verifiers 0.4: rebuilds a call's task from its data and runs one episode of it.

Episodes are the library's own. Its deltas are reported as progress where the caller wants some; the library's own
clients then get no more than what is missing. Imports verifiers: import it only where that is used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.retries import RetryConfig
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.utils.retries import run_episode_with_retry

from envbus.adapters.verifiers.taskset_examples import TasksetExamples
from envbus.adapters.verifiers.taskset_outputs import episode_output
from envbus.adapters.verifiers.taskset_requests import Allowed, is_of_their_client, read_request, rebuilt
from envbus.adapters.verifiers.taskset_serving import Serving
from envbus.adapters.verifiers.taskset_stream import streamed
from envbus.environments import progress
from envbus.evaluation.rows import failed_output
from envbus.types import RolloutInput, RolloutOutput, SamplingArgs


class TasksetHost:
    """The hosting protocol for an environment of verifiers 0.4.

    Args:
        env: As the library's load_environment returned it.
        select: Which tasks are its eval set.
    """

    wants_client_config = True
    """Its rollouts call models by themselves: they get a CheckedClient."""
    requires_group_rollouts = False
    """Nothing couples the episodes of a task."""

    def __init__(self, env: Any, select: SelectConfig | None = None) -> None:
        self._env = env
        self._select = select or SelectConfig()
        self._allowed = Allowed()
        self._serving = Serving(env.serving)

    async def open(self) -> None:
        """Start what all episodes share: tool servers, the interception of model calls, the environment's own."""
        await self._serving.open()

    async def close(self) -> None:
        """End what open started."""
        await self._serving.close()

    def set_kwargs(self, *, renderer_models: Sequence[str] = (), skill_folders: Sequence[str] = ()) -> None:
        """What clients may choose.

        Args:
            renderer_models: Models whose tokenizer a ``train`` client may have loaded.
            skill_folders: Folders of this host that ``skills`` in task data may be in.
        """
        self._allowed = Allowed(tuple(renderer_models), tuple(skill_folders))

    def eval_examples(self) -> TasksetExamples:
        """Its tasks, as inputs that carry their data."""
        return TasksetExamples(self._env.taskset.select(self._select))

    async def run_rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
    ) -> RolloutOutput:
        """Run one episode. A failed one is an output with ``error``; raises for an input that is no task of it.

        Args:
            input: With ``task_data``, a task's data. With ``client`` and ``sampling``, as the library's own servers
                take them, those are used instead of the arguments.
            client: A CheckedClient, or a ClientConfig where it is called in the caller's own process.
            model: The model's name.
            sampling_args: As the library's SamplingConfig.
            max_retries: Whole episodes again, whatever failed; beside what the environment's config says.
            state_columns: Each that is no field of the output is None in it.
        """
        request = read_request(input, client, model, sampling_args, self._allowed)
        await self._serving.open()
        (slot,) = self._env.slots(rebuilt(self._env, request.task_data))
        context = ModelContext(client=request.client, model=model, sampling=request.sampling)
        run = partial(self._env.run_slot, slot, context)
        started, is_watched = time.monotonic(), progress.is_wanted()
        if is_watched:
            about = None if is_of_their_client(input) else partial(_turn, slot, input, progress.position.get())
            async with streamed(lambda: slot.traces, about) as watch:
                episode = await _retried(partial(run, on_trace=watch), max_retries)
        else:
            episode = await _retried(run, max_retries)
        output = episode_output(episode, input, was_watched=is_watched, total_s=time.monotonic() - started)
        output.update({name: None for name in state_columns or () if name not in output})
        return cast(RolloutOutput, output)

    async def run_group(
        self,
        group_inputs: list[RolloutInput],
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
    ) -> list[RolloutOutput]:
        """Run an episode for each input at the same time; one that cannot be run fails alone."""

        async def member(position: int, input: RolloutInput) -> RolloutOutput:
            progress.position.set(position)  # in the context of its own task
            start_time, started = time.time(), time.monotonic()
            try:
                return await self.run_rollout(input, client, model, sampling_args, max_retries, state_columns)
            except Exception as error:  # noqa: BLE001 - the top of a member's task: its error is its output
                total_s = time.monotonic() - started
                example_id = input.get("example_id", 0)
                return failed_output(input, error, example_id=example_id, start_time=start_time, total_s=total_s)

        async with asyncio.TaskGroup() as group:
            members = [group.create_task(member(*each)) for each in enumerate(group_inputs)]
        return [each.result() for each in members]


async def _retried(run: Callable[[], Any], max_retries: int) -> Any:
    return await (run_episode_with_retry(run, RetryConfig(max_retries=max_retries)) if max_retries else run())


def _turn(slot: Any, input: RolloutInput, position: int) -> dict[str, Any]:
    """What native environments tell, too: which turn of which example it is."""
    turn = sum(trace.num_turns for trace in slot.traces)
    return {"example_id": input.get("example_id", 0), "position": position, "turn": turn}
