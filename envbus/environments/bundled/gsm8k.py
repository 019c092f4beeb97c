"""gsm8k: grade-school maths word problems.

Data: the Hugging Face dataset ``openai/gsm8k`` (config main: 7,473 train and 1,319 test problems), loaded on first
use. Reward: 1 if the last boxed expression of the answer equals the solution mathematically (math-verify), else 0.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from envbus.environments import Rubric, SingleTurnEnv, ThinkParser
from envbus.types import Messages

if TYPE_CHECKING:
    from datasets import Dataset

SYSTEM_PROMPT = "Solve the problem step by step. Put your final answer within \\boxed{}."
MAX_ANSWER_CHARS = 200
# Numbers, fractions, products and units. Powers, factorials, sums or variables can keep a verifier busy for ever.
_NEUTRAL = re.compile(r"\\(?:text|mathrm)\{[^{}]*\}|\\[dt]?frac|\\(?:cdot|times|left|right)\b|\\[$%,;: ]|^\s*[a-z]\s*=")
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[\d\s.,/+\-*(){}$%]*")

# It warns about the missing timeouts that last_boxed and is_arithmetic make unnecessary.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def load_environment(
    system_prompt: str = SYSTEM_PROMPT, num_train_examples: int = -1, num_eval_examples: int = -1
) -> SingleTurnEnv:
    r"""The environment.

    Args:
        system_prompt: Instructions put before each problem; they must ask for ``\boxed{}``.
        num_train_examples: The first so many training problems; all if negative.
        num_eval_examples: The first so many test problems; all if negative.
    """
    return SingleTurnEnv(
        dataset=partial(_problems, "train", num_train_examples),
        eval_dataset=partial(_problems, "test", num_eval_examples),
        system_prompt=system_prompt,
        rubric=Rubric([correct_answer], parser=ThinkParser(last_boxed)),
    )


def correct_answer(completion: Messages, answer: str, parser: ThinkParser) -> float:
    """1 for an answer that is mathematically equal to the solution."""
    from math_verify import parse, verify

    given = parser.parse_answer(completion)
    if not given or not is_arithmetic(given):
        return 0.0
    # No timeouts: math-verify makes them of signals, which only work in a main thread and not inside long C calls.
    parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, given)]
    return float(verify(*parsed, timeout_seconds=None))


def is_arithmetic(text: str) -> bool:
    """Whether an answer is short and plain enough to be verified without a time limit."""
    return len(text) <= MAX_ANSWER_CHARS and _ARITHMETIC.fullmatch(_NEUTRAL.sub(" ", text)) is not None


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, braces balanced; None if there is none."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + len("\\boxed"), min(len(text), start + 10 * MAX_ANSWER_CHARS)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end].strip()
    return None


def _problems(split: str, limit: int) -> Dataset:
    from datasets import load_dataset

    dataset = load_dataset("openai/gsm8k", "main", split=split)
    chosen = dataset if limit < 0 else dataset.select(range(min(limit, len(dataset))))
    solutions = [_final_number(solution) for solution in chosen["answer"]]
    return chosen.remove_columns("answer").add_column("answer", solutions)


def _final_number(solution: str) -> Any:
    return solution.rpartition("####")[2].strip().replace(",", "")
