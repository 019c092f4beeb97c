"""reasoning-gym: the procedural tasks of the reasoning-gym package (``pip install 'envbus[reasoning-gym]'``), offline.

Data: made on first use from the tasks' generators; training and evaluation examples differ. Reward: the task's own
score of the text in ``<answer>`` tags, from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envbus.environments import Parser, Rubric, SingleTurnEnv, XMLParser
from envbus.errors import EnvArgsError
from envbus.types import Info, Messages

SYSTEM_PROMPT = "Think about the problem, then give your final answer, and nothing else, in <answer> tags."
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""What some tasks' scores raise at an answer of the wrong form."""


def load_environment(
    task: str = "leg_counting",
    num_train_examples: int = 2_000,
    num_eval_examples: int = 200,
    seed: int = 0,
    task_args: dict[str, Any] | None = None,
    system_prompt: str = SYSTEM_PROMPT,
    tasks: Sequence[str | Mapping[str, Any]] | None = None,
) -> SingleTurnEnv:
    """The environment.

    Args:
        task: Name of the task in reasoning-gym, e.g. ``"chain_sum"``.
        num_train_examples: Size of the training set.
        num_eval_examples: Size of the evaluation set.
        seed: Seed of the training set; the evaluation set continues where it ends.
        task_args: Settings of the task's generator, e.g. ``{"min_terms": 3}``.
        system_prompt: Instructions put before each problem.
        tasks: A mixture instead of one task: names, or ``{"task": name, "weight": 2.0, "task_args": {...}}``. Each
            example is of a task drawn by the weights (default 1).
    """
    parser = XMLParser(["answer"])
    # Entry number i is made from the seed and i, so one generator serves both sets and neither sees the other's.
    size = {"size": num_train_examples + num_eval_examples, "seed": seed}
    entries = _made(task, {**(task_args or {}), **size}) if tasks is None else _mixed(tasks, size)

    def rows(first: int, size: int) -> list[dict[str, Any]]:
        return [_row(entries[index], index) for index in range(first, first + size)]

    def task_score(completion: Messages, info: Info, parser: Parser) -> float:
        """The task's own score of the answer."""
        # Made again rather than carried in info: entries hold objects that do not survive the bus.
        entry = entries[info["index"]]
        try:
            return float(entries.score_answer(parser.parse_answer(completion), entry))
        except _UNREADABLE:
            return 0.0

    return SingleTurnEnv(
        dataset=lambda: rows(0, num_train_examples),
        eval_dataset=lambda: rows(num_train_examples, num_eval_examples),
        system_prompt=system_prompt,
        rubric=Rubric([task_score], parser=parser),
    )


def _made(task: str, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the package is missing: pip install 'envbus[reasoning-gym]'") from error
    try:
        return reasoning_gym.create_dataset(task, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise EnvArgsError(f"reasoning-gym refuses task {task!r} with {settings}: {error}") from error


def _mixed(tasks: Sequence[str | Mapping[str, Any]], size: dict[str, int]) -> Any:
    parts: list[dict[str, Any]] = [{"task": each} if isinstance(each, str) else dict(each) for each in tasks]
    names = [part.pop("task", None) for part in parts]
    if not names or None in names or len(set(names)) < len(names):
        raise EnvArgsError(f"tasks: each entry names another task, and there is at least one; got {list(tasks)}")
    if unknown := sorted({key for part in parts for key in part} - {"weight", "task_args"}):
        raise EnvArgsError(f"tasks: an entry has task, weight and task_args, not {', '.join(unknown)}")
    for name, part in zip(names, parts, strict=True):
        _made(name, {**part.get("task_args", {}), **size})  # so that a refusal names the task
    from reasoning_gym.composite import DatasetSpec

    specs = [
        DatasetSpec(name, float(part.get("weight", 1.0)), {**part.get("task_args", {}), "size": size["size"]})
        for name, part in zip(names, parts, strict=True)
    ]
    return _made("composite", {**size, "datasets": specs})


def _row(entry: dict[str, Any], index: int) -> dict[str, Any]:
    """The task's answer is one of the right ones, and empty where there is no such text."""
    info = {"index": index, "task": entry["metadata"]["source_dataset"]}
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return {"question": entry["question"], "answer": answer, "info": info}
