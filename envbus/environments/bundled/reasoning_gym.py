"""reasoning-gym: any procedural task of the reasoning-gym package (``pip install 'envbus[reasoning-gym]'``), offline.

Data: made on first use from the task's generator; training and evaluation examples differ. Reward: the task's own
score of the text in ``<answer>`` tags, from 0 to 1.
"""

from __future__ import annotations

from typing import Any

from envbus.environments import Parser, Rubric, SingleTurnEnv, XMLParser
from envbus.errors import EnvArgsError
from envbus.types import Info, Messages

SYSTEM_PROMPT = "Think about the problem, then give your final answer, and nothing else, in <answer> tags."


def load_environment(
    task: str = "leg_counting",
    num_train_examples: int = 2_000,
    num_eval_examples: int = 200,
    seed: int = 0,
    task_args: dict[str, Any] | None = None,
    system_prompt: str = SYSTEM_PROMPT,
) -> SingleTurnEnv:
    """The environment.

    Args:
        task: Name of the task in reasoning-gym, e.g. ``"chain_sum"``.
        num_train_examples: Size of the training set.
        num_eval_examples: Size of the evaluation set.
        seed: Seed of the training set; the evaluation set continues where it ends.
        task_args: Settings of the task's generator, e.g. ``{"min_terms": 3}``.
        system_prompt: Instructions put before each problem.
    """
    parser = XMLParser(["answer"])
    # Entry number i of a task is made from seed + i, so one generator serves both sets and neither sees the other's.
    entries = _made(task, {**(task_args or {}), "size": num_train_examples + num_eval_examples, "seed": seed})

    def rows(first: int, size: int) -> list[dict[str, Any]]:
        return [_row(entries[index], index) for index in range(first, first + size)]

    def task_score(completion: Messages, info: Info, parser: Parser) -> float:
        """The task's own score of the answer."""
        # Made again rather than carried in info: entries hold objects that do not survive the bus.
        return float(entries.score_answer(parser.parse_answer(completion), entries[info["index"]]))

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


def _row(entry: dict[str, Any], index: int) -> dict[str, Any]:
    return {"question": entry["question"], "answer": str(entry["answer"]), "info": {"index": index}}
