"""Datasets as rollout inputs: prompts from questions, and an example_id in every row, unique in the dataset."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

from envbus.environments.state import as_messages
from envbus.errors import UsageError
from envbus.types import Messages, RolloutInput

if TYPE_CHECKING:
    from datasets import Dataset

Rows: TypeAlias = Union[list[dict[str, Any]], "Dataset"]
DatasetSource: TypeAlias = Rows | Callable[[], Rows]
"""A datasets.Dataset, a list of rows, or a function without arguments that builds one when it is first needed."""


def prepared(source: DatasetSource, *, system_prompt: str | None, few_shot: Messages | None) -> Rows:
    """The rows with ``prompt`` and ``example_id``; a list for a list, a Dataset for a Dataset. The source is kept.

    Raises:
        UsageError: Rows without prompt and question, or an example_id that is repeated or not a JSON scalar.
    """
    rows = source() if callable(source) else source
    if isinstance(rows, list):
        return _prepared_list(rows, system_prompt, few_shot)
    if hasattr(rows, "column_names"):
        return _prepared_dataset(rows, system_prompt, few_shot)
    raise UsageError(f"a dataset must be a datasets.Dataset or a list of rows, not {type(rows).__name__}")


def selected(rows: Rows, n: int, seed: int | None) -> Rows:
    """A new list or Dataset of the first ``n`` rows (all if negative), after a shuffle if a seed is given."""
    order = list(range(len(rows)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    order = order if n < 0 else order[:n]
    return [dict(rows[i]) for i in order] if isinstance(rows, list) else rows.select(order)


def as_inputs(rows: Rows) -> list[RolloutInput]:
    """The rows as a list of plain dicts."""
    return cast(list[RolloutInput], list(rows) if isinstance(rows, list) else rows.to_list())


def _prepared_list(
    rows: list[dict[str, Any]], system_prompt: str | None, few_shot: Messages | None
) -> list[dict[str, Any]]:
    ids = _example_ids([row.get("example_id") for row in rows])
    return [
        {**row, "prompt": _prompt(row, system_prompt, few_shot), "example_id": example_id}
        for row, example_id in zip(rows, ids, strict=True)
    ]


def _prepared_dataset(dataset: Dataset, system_prompt: str | None, few_shot: Messages | None) -> Dataset:
    columns = [name for name in ("prompt", "question", "example_id") if name in dataset.column_names]
    rows = dataset.select_columns(columns).to_list()
    prompts = [_prompt(row, system_prompt, few_shot) for row in rows]
    ids = _example_ids([row.get("example_id") for row in rows])
    # The new columns come before the old ones go: a Dataset without columns has forgotten its length.
    added = dataset.add_column("_prompt", prompts).add_column("_example_id", ids)
    replaced = added.remove_columns([name for name in columns if name != "question"])
    return replaced.rename_columns({"_prompt": "prompt", "_example_id": "example_id"})


def _prompt(row: Mapping[str, Any], system_prompt: str | None, few_shot: Messages | None) -> Messages:
    if row.get("prompt") is not None:
        messages = as_messages(row["prompt"])
        shots: Messages = []
    elif row.get("question") is not None:
        messages = as_messages(row["question"])
        shots = [dict(shot) for shot in few_shot or []]
    else:
        raise UsageError(f"a dataset row needs a prompt or a question; this one has: {', '.join(row) or 'nothing'}")
    has_system = bool(messages) and messages[0].get("role") == "system"
    system: Messages = [{"role": "system", "content": system_prompt}] if system_prompt and not has_system else []
    return [*system, *shots, *messages]


def _example_ids(given: Iterable[Any]) -> list[Any]:
    """Ids that are there stay as they are; missing ones are numbered by row, past numbers that are taken."""
    ids = list(given)
    taken: dict[Any, int] = {}
    for row, example_id in enumerate(ids):
        if example_id is None:
            continue
        if not isinstance(example_id, str | int | float):
            raise UsageError(f"example_id of row {row} must be a text or a number, not {type(example_id).__name__}")
        if example_id in taken:
            raise UsageError(
                f"example_id {example_id!r} is in rows {taken[example_id]} and {row}; ids must be unique, "
                "so leave the column out to have the rows numbered, or ask for several rollouts per example"
            )
        taken[example_id] = row
    return [_free(row, taken) if example_id is None else example_id for row, example_id in enumerate(ids)]


def _free(row: int, taken: dict[Any, int]) -> int:
    number = row if row not in taken else next(n for n in count(row + 1) if n not in taken)
    taken[number] = row
    return number
