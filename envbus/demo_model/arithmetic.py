"""Numbers and plain arithmetic in text: found, and worked out without eval (pure)."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Repeats are bounded, so that no text makes the search slow.
_EXPRESSION = re.compile(r"\(*\s*-?\d[\d\s.()]{0,40}(?:[-+*/\u00d7\u00f7][\s\d.()-]{0,40}\d[\s\d.()]{0,40}){1,40}")
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_CHARS = 400


def numbers_in(text: str) -> list[str]:
    """The numbers of a text as written, thousands separators dropped."""
    return _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))


def find_expression(text: str) -> str | None:
    """The longest arithmetic expression in a text, if it can be worked out."""
    found = [match.group().strip() for match in _EXPRESSION.finditer(text)]
    return next((each for each in sorted(found, key=len, reverse=True) if evaluate(each) is not None), None)


def evaluate(expression: str) -> str | None:
    """The value of an expression of numbers, + - * / and brackets; None if it is not one."""
    if len(expression) > _MAX_CHARS:
        return None
    try:
        tree = ast.parse(expression.replace("\u00d7", "*").replace("\u00f7", "/").strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not plain arithmetic")
