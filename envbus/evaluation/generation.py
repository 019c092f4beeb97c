"""Runs many rollouts through anything that runs one, and returns all outputs in input order.

One limit bounds the rollouts in flight, and every task is cancelled and awaited on
any exit. How a call fails, and what is saved, resumed and summed up, is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from envbus.errors import EncodeError, UsageError
from envbus.evaluation.callbacks import EvalCallbacks, call_safely
from envbus.evaluation.calls import RolloutCalls, Work, reports_progress
from envbus.evaluation.endpoints import client_for_example, describe_base_url
from envbus.evaluation.limiter import FifoLimiter
from envbus.evaluation.results import ResultsWriter, write_metadata
from envbus.evaluation.resume import inputs_digest, load_kept_rows
from envbus.evaluation.run_paths import default_results_path, run_folder
from envbus.evaluation.summary import summarize
from envbus.types import (
    GenerateMetadata,
    GenerateOutputs,
    RolloutInput,
    RolloutOutput,
    RolloutRunner,
    SamplingArgs,
)

logger = logging.getLogger(__name__)


async def generate(
    runner: RolloutRunner,
    inputs: Sequence[RolloutInput],
    client: Any,
    model: str,
    sampling_args: SamplingArgs | None = None,
    *,
    env_id: str,
    env_args: dict[str, Any] | None = None,
    rollouts_per_example: int = 1,
    group_scoring: bool = False,
    max_concurrent: int = -1,
    results_path: Path | str | None = None,
    save_results: bool = False,
    state_columns: Sequence[str] | None = None,
    max_retries: int = 0,
    rollout_timeout_s: float | None = None,
    callbacks: EvalCallbacks | None = None,
) -> GenerateOutputs:
    """Roll out all inputs.

    Args:
        runner: What runs a rollout or a group: an environment, or a client of a served one.
        inputs: Each example repeated ``rollouts_per_example`` times in a row, see ``repeat_examples``.
            Rollouts belong together by position, never by ``example_id``.
        client: Passed on to the runner; a ClientConfig with several endpoints is split, one endpoint per example.
        model: Name of the model.
        sampling_args: Passed on to the runner.
        env_id: Name of the environment, for the saved run.
        env_args: Its arguments, for the saved run.
        rollouts_per_example: How many neighbouring inputs are the same example.
        group_scoring: Run an example's rollouts as one group.
        max_concurrent: Most rollouts in flight, a group of n counted as n; -1 for no limit.
        results_path: Folder of the run; results are saved there. If it holds results already, only missing and
            failed rollouts run again (with group scoring: their whole group).
        save_results: Save even without ``results_path``, in a new folder below ``outputs/evals``.
        state_columns: Further state fields wanted in the outputs.
        max_retries: Passed on to the runner.
        rollout_timeout_s: Ends a rollout or group that takes longer; it becomes failed outputs.
        callbacks: Hooks for displays.

    Returns:
        Outputs in input order, failed ones included, and the run's metadata.

    Raises:
        UsageError: The arguments do not fit together, a group is over ``max_concurrent``, the results path cannot
            be written, or it holds a run with other settings.
    """
    inputs = list(inputs)
    callbacks = callbacks or EvalCallbacks()
    _check_arguments(inputs, rollouts_per_example, state_columns)
    calls = RolloutCalls(
        runner=runner,
        model=model,
        sampling_args=sampling_args,
        max_retries=max_retries,
        state_columns=None if state_columns is None else list(state_columns),
        rollout_timeout_s=rollout_timeout_s,
        on_progress=callbacks.on_progress if callbacks.wants_progress and reports_progress(runner) else None,
    )
    folder = run_folder(results_path) if results_path is not None else None
    if folder is None and save_results:
        folder = default_results_path(env_id, model)
    metadata: GenerateMetadata = {
        "env_id": env_id,
        "env_args": env_args or {},
        "model": model,
        "base_url": describe_base_url(client),
        "num_examples": len(inputs) // rollouts_per_example,
        "rollouts_per_example": rollouts_per_example,
        "group_scoring": group_scoring,
        "sampling_args": sampling_args or {},
        "state_columns": list(state_columns or ()),
        "inputs_sha256": inputs_digest(inputs[::rollouts_per_example]) if folder else "",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "path_to_save": str(folder) if folder else None,
        "save_error": None,
    }
    run = _Run(
        calls,
        inputs,
        metadata,
        limiter=FifoLimiter(max_concurrent),
        callbacks=callbacks,
        client=client,
    )
    return await run.execute(folder)


class _Run:
    """The state of one call of generate."""

    def __init__(
        self,
        calls: RolloutCalls,
        inputs: Sequence[RolloutInput],
        metadata: GenerateMetadata,
        *,
        limiter: FifoLimiter[int],
        callbacks: EvalCallbacks,
        client: Any,
    ) -> None:
        self._calls = calls
        self._inputs = inputs
        self._metadata = metadata
        self._line = limiter
        self._callbacks = callbacks
        self._client = client
        self._step = metadata["rollouts_per_example"] if metadata["group_scoring"] else 1
        self._outputs: list[RolloutOutput | None] = [None] * len(inputs)
        self._writer: ResultsWriter | None = None
        self._clock = time.perf_counter()

    async def execute(self, folder: Path | None) -> GenerateOutputs:
        """Load what is there, run the rest, save and sum up on every way out."""
        kept = load_kept_rows(folder, self._metadata) if folder else {}
        for index, output in kept.items():
            self._outputs[index] = output
        self._fill_line()
        if folder:
            self._open_results(folder)
        try:
            self._announce(list(kept.values()))
            async with asyncio.TaskGroup() as tasks:
                self._start_ready(tasks)
        finally:
            self._finish()
        return {"outputs": [output for output in self._outputs if output is not None], "metadata": self._metadata}

    def _fill_line(self) -> None:
        for start in range(0, len(self._inputs), self._step):
            if self._outputs[start] is None:
                self._line.add(start, weight=self._step)

    def _work(self, start: int) -> Work:
        """Made only when it runs, so that a long line takes little memory."""
        examples = list(self._inputs[start : start + self._step])
        client = client_for_example(self._client, start // self._metadata["rollouts_per_example"])
        return Work(start, examples, client, self._metadata["group_scoring"])

    def _open_results(self, folder: Path) -> None:
        self._writer = ResultsWriter(folder)
        try:
            self._metadata.update(self._numbers())
            write_metadata(folder, self._metadata)
        except (OSError, EncodeError) as exc:
            self._writer.close()
            raise UsageError(f"cannot save results in {folder}: {exc}; choose another results path") from exc

    def _announce(self, kept: list[RolloutOutput]) -> None:
        call_safely(self._callbacks.on_start, len(self._inputs), kept)
        if kept:
            path = self._metadata["path_to_save"]
            self._log(f"resuming {path}: {len(kept)} of {len(self._inputs)} rollouts are there")

    def _start_ready(self, tasks: asyncio.TaskGroup) -> None:
        for start in self._line.start_ready():
            tasks.create_task(self._do(start, tasks), name=f"rollout-{start}")

    async def _do(self, start: int, tasks: asyncio.TaskGroup) -> None:
        outputs = await self._calls.outputs_of(self._work(start))
        rows = dict(enumerate(outputs, start=start))
        for index, output in rows.items():
            self._outputs[index] = output
            call_safely(self._callbacks.on_output, output)
        if self._callbacks.wants_progress:
            call_safely(self._callbacks.on_progress, start, None)
        if self._writer:
            await self._writer.append(rows)
        self._line.release(weight=self._step)
        self._start_ready(tasks)

    def _finish(self) -> None:
        self._metadata.update(self._numbers())
        if self._writer:
            self._save_end(self._writer)
        if self._metadata["save_error"]:
            self._log(self._metadata["save_error"])
        call_safely(self._callbacks.on_end, self._metadata)

    def _save_end(self, writer: ResultsWriter) -> None:
        self._metadata["save_error"] = writer.close()
        try:
            write_metadata(writer.folder, self._metadata)
        except OSError as exc:
            logger.error("cannot write the metadata of %s: %s", writer.folder, exc)
            self._metadata["save_error"] = self._metadata["save_error"] or f"metadata could not be saved: {exc}"

    def _numbers(self) -> GenerateMetadata:
        numbers = summarize(self._outputs, rollouts_per_example=self._metadata["rollouts_per_example"])
        numbers["time_s"] = time.perf_counter() - self._clock
        return numbers

    def _log(self, message: str) -> None:
        logger.info(message)
        call_safely(self._callbacks.on_log, message)


def _check_arguments(
    inputs: Sequence[RolloutInput], rollouts_per_example: int, state_columns: Sequence[str] | None
) -> None:
    if rollouts_per_example < 1:
        raise UsageError(f"rollouts_per_example must be at least 1, got {rollouts_per_example}")
    if len(inputs) % rollouts_per_example:
        raise UsageError(
            f"{len(inputs)} inputs are not a multiple of rollouts_per_example={rollouts_per_example}; "
            "repeat each example that many times in a row (repeat_examples)"
        )
    if isinstance(state_columns, str):
        raise UsageError(f"state_columns must be a list of names, not the text {state_columns!r}")
    if state_columns and "index" in state_columns:
        raise UsageError("the state column 'index' is taken by the position in saved results; name it otherwise")


def _versions() -> dict[str, str]:
    try:
        envbus_version = version("envbus")
    except PackageNotFoundError:
        envbus_version = "unknown"  # run from a source tree
    return {"envbus": envbus_version, "python": platform.python_version()}
