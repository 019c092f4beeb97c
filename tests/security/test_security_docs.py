"""docs/security.md against the tests: every attack in its tables is made, and every attack that is made is in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from oversteps import OVERSTEPS
from test_exhaustion import BOUNDS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`tests/security/(\w+\.py)::(\w+)`")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of attacks."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| attack"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f"{file.name}::{node.name}" for node in functions if node.name.startswith("test_")}


def test_every_test_is_named_and_exists() -> None:
    there = {test for file in HERE.glob("test_*.py") if file != Path(__file__) for test in named_in(file)}
    assert {"::".join(named) for named in NAMED.findall(PAGE)} == there


@pytest.mark.parametrize("title", ["On the bus", "Exhaustion", "Credentials"])
def test_every_attack_has_a_protection_and_a_test(title: str) -> None:
    found = rows(section(title))
    assert len(found) > 3
    for attack, protection, test in found:
        assert attack
        assert protection
        assert NAMED.search(test) or test.strip("`") in (*OVERSTEPS, *BOUNDS), test


@pytest.mark.parametrize(("title", "kinds"), [("On the bus", OVERSTEPS), ("Exhaustion", BOUNDS)])
def test_every_kind_of_attack_is_told(title: str, kinds: dict[str, object]) -> None:
    told = [test.strip("`") for *_, test in rows(section(title)) if not NAMED.search(test)]
    assert sorted(told) == sorted(kinds)
