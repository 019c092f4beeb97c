"""calculator: arithmetic with large numbers, with a calculator as a tool. Works offline.

Data: made from a seed: expressions of three to five integers with ``+``, ``-`` and ``*``. Reward: 1 if the last number
in the final answer is right, else 0; reported beside it: tool calls, and whether the calculator was used.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Any

from envbus.environments import Parser, Rubric, State, ToolEnv
from envbus.types import Messages

SYSTEM_PROMPT = "Answer the question. Use the calculator for every step, then say the result as a plain number."
OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}
MAX_EXPRESSION_CHARS = 200


def load_environment(
    num_train_examples: int = 1_000, num_eval_examples: int = 100, seed: int = 0, max_turns: int = 8
) -> ToolEnv:
    """The environment.

    Args:
        num_train_examples: Size of the training set.
        num_eval_examples: Size of the evaluation set.
        seed: Seed of the training set; evaluation examples come from the next one.
        max_turns: Model calls per rollout at most.
    """
    return ToolEnv(
        tools=[calculate],
        max_turns=max_turns,
        dataset=_questions(num_train_examples, seed),
        eval_dataset=_questions(num_eval_examples, seed + 1),
        system_prompt=SYSTEM_PROMPT,
        rubric=Rubric([correct_result, used_calculator], weights=[1.0, 0.0]),
    )


def calculate(expression: str) -> int:
    """Compute an expression of integers with +, -, * and parentheses.

    Args:
        expression: For example "(12 + 30) * -7".
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION_CHARS} characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def correct_result(completion: Messages, answer: str, parser: Parser) -> float:
    """1 if the last number of the final answer is the result."""
    numbers = re.findall(r"-?\d+", (parser.parse_answer(completion) or "").replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def used_calculator(state: State) -> float:
    """1 if the model called the tool at least once."""
    return float(any(message["role"] == "tool" for message in state["completion"]))


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("only integers, +, -, * and parentheses are allowed")


def _questions(size: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    expressions = [_expression(rng) for _ in range(size)]
    return [{"question": f"What is {text}?", "answer": str(calculate(text))} for text in expressions]


def _expression(rng: random.Random) -> str:
    numbers = [str(rng.randint(100, 99_999)) for _ in range(rng.randint(3, 5))]
    return numbers[0] + "".join(f" {rng.choice('+-*')} {number}" for number in numbers[1:])
