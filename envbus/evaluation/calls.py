"""One call of a runner: a rollout or a group, with its time limit.

A call never raises because of what went wrong in it: it gives one output per input,
failed ones if need be. Only its own cancelling goes through.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from envbus.errors import CallCancelledError, RolloutTimeoutError
from envbus.evaluation.rows import checked_outputs, failed_output
from envbus.types import RolloutInput, RolloutOutput, RolloutProgress, RolloutRunner, SamplingArgs

logger = logging.getLogger(__name__)


def reports_progress(runner: RolloutRunner) -> bool:
    """Whether a runner knows on_progress: those of others need not."""
    return all("on_progress" in inspect.signature(run).parameters for run in (runner.run_rollout, runner.run_group))


@dataclass(frozen=True, slots=True)
class Work:
    """Neighbouring inputs that run as one call."""

    start: int
    """Position of the first."""
    examples: list[RolloutInput]
    client: Any
    as_group: bool

    @property
    def weight(self) -> int:
        """What it counts toward the limit: its rollouts."""
        return len(self.examples)


@dataclass(frozen=True, slots=True)
class RolloutCalls:
    """Makes calls with the settings that are the same for all."""

    runner: RolloutRunner
    model: str
    sampling_args: SamplingArgs | None
    max_retries: int
    state_columns: list[str] | None
    rollout_timeout_s: float | None
    on_progress: Callable[[int, RolloutProgress], None] | None = None
    """Gets the position of the first input of what reports, and the report."""

    async def outputs_of(self, work: Work) -> list[RolloutOutput]:
        """Run the work; whatever goes wrong in it becomes one failed output per input."""
        start_time, clock = time.time(), time.perf_counter()
        limit = asyncio.timeout(self.rollout_timeout_s)
        error: BaseException
        try:
            async with limit:
                return checked_outputs(await self._call(work), expected=work.weight)
        except asyncio.CancelledError as exc:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            error = CallCancelledError("the rollout was cancelled by what runs it")
            error.__cause__ = exc
        except TimeoutError as exc:
            error = exc
            if limit.expired():
                error = RolloutTimeoutError(f"not done within the rollout timeout of {self.rollout_timeout_s} s")
        except Exception as exc:  # noqa: BLE001 - the top of a task: a failed call is data
            error = exc
        return self._failed_outputs(work, error, start_time=start_time, total_s=time.perf_counter() - clock)

    async def _call(self, work: Work) -> Any:
        settings: tuple[Any, ...] = (
            work.client,
            self.model,
            None if self.sampling_args is None else dict(self.sampling_args),
        )
        options: dict[str, Any] = {"max_retries": self.max_retries, "state_columns": self.state_columns}
        if self.on_progress is not None:
            options["on_progress"] = partial(self.on_progress, work.start)
        # Rollouts of an example share its row: one that adds keys must not change the others'.
        examples = [example.copy() for example in work.examples]
        if work.as_group:
            return await self.runner.run_group(examples, *settings, **options)
        return [await self.runner.run_rollout(examples[0], *settings, **options)]

    @staticmethod
    def _failed_outputs(work: Work, error: BaseException, *, start_time: float, total_s: float) -> list[RolloutOutput]:
        outputs = [
            failed_output(example, error, example_id=work.start + i, start_time=start_time, total_s=total_s)
            for i, example in enumerate(work.examples)
        ]
        logger.info("rollouts from position %d failed: %s", work.start, outputs[0]["error"])
        return outputs
