"""Tasks as rollout inputs. Those of an endless taskset are made when they are first asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, overload

from verifiers.v1.dialects.chat import message_to_wire

OF_AN_ENDLESS_TASKSET = 1_000
"""How many tasks the eval set of an endless taskset has, if ``select`` does not say."""


class TasksetExamples(Sequence[dict[str, Any]]):
    """The rows of a taskset, or of a view of one.

    Args:
        taskset: Read to its end at once if it has one.
    """

    def __init__(self, taskset: Any) -> None:
        self._tasks: Iterator[Any] = iter(taskset)
        self._rows: list[dict[str, Any]] = []
        self._reading = threading.Lock()
        if taskset.bounded:
            self._rows = [example_row(task) for task in self._tasks]
        self._total = len(self._rows) if taskset.bounded else OF_AN_ENDLESS_TASKSET

    def __len__(self) -> int:
        return self._total

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[number] for number in range(self._total)[index]]
        number = range(self._total)[index]
        with self._reading:
            missing = number + 1 - len(self._rows)
            self._rows += [example_row(task) for task in islice(self._tasks, max(missing, 0))]
        return self._rows[number]


def example_row(task: Any) -> dict[str, Any]:
    """The rollout input of a task; ``task_data`` is what it is rebuilt from."""
    data = task.data
    row = {"example_id": data.idx, "prompt": prompt_of(data), "task_data": data.model_dump(mode="json")}
    answer = getattr(data, "answer", None)
    return {**row, "answer": answer} if isinstance(answer, str) else row


def prompt_of(data: Any) -> list[dict[str, Any]]:
    """The messages that a task starts with, in OpenAI's form."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(message) for message in data.prompt or [])]
