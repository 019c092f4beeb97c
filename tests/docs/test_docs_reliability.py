"""docs/reliability.md against the code: its tests exist, its settings are the real ones, no case is left out."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

import pytest
from doc_pages import ROOT, read

from envbus.controller.policies import RestartPolicy
from envbus.settings import GIB, KIB, MIB, ClientSettings, ServerSettings

PAGE = "docs/reliability.md"
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "": 1, "s": 1}
NAMED = re.compile(r"`tests/([\w/]+\.py)::(\w+)`")
CASES = [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 19, 20, 22, 23, 24, 28, 29, 30, 31, 33, 34, 35, 36, 37, 38]
CASES += [41, 46, 47, 49, 51, 52, 53, 56, 58, 59, 60, 61, 64, 65]
UNTESTED = (
    "A heartbeat during a C call",
    "Nothing left by a server that was started",
    "A controller that is killed in",
)
"""What is not promised, and needs no test to be believed."""


@cache
def named_tests(file: str) -> dict[str, str]:
    """The tests of a file, each with its docstring and that of the file."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    about = ast.get_docstring(tree) or ""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        node.name: f"{about} {ast.get_docstring(node) or ''}" for node in functions if node.name.startswith("test_")
    }


def section(title: str) -> str:
    return read(PAGE).partition(f"# {title}\n")[2].partition("\n#")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a section's table rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_test_that_is_named_exists() -> None:
    named = NAMED.findall(read(PAGE))
    assert len(named) > 200
    assert [f"{file}::{name}" for file, name in named if name not in named_tests(file)] == []
    assert read(PAGE).count("`tests/") == len(named)


@pytest.mark.parametrize("title", ["A call", "What may go wrong", "What is bounded", "What is not promised"])
def test_every_line_names_its_tests(title: str) -> None:
    lines = re.split(r"^- ", section(title), flags=re.MULTILINE)[1:]
    assert len(lines) > 5
    without = [line for line in lines if not NAMED.search(line)]
    assert [line for line in without if not line.lstrip("*").startswith(UNTESTED)] == []


@pytest.mark.parametrize("title", ["How long a rollout may run for nobody", "Settings of a client", "Cases"])
def test_every_row_names_its_tests(title: str) -> None:
    found = rows(section(title))
    assert len(found) > 5
    assert [cells[0] for cells in found if not NAMED.search(cells[-1])] == []


@pytest.mark.parametrize(("title", "settings"), [("client", ClientSettings), ("server", ServerSettings)])
def test_every_setting_is_there_with_its_default(title: str, settings: Any) -> None:
    stated = {cells[0].strip("`"): amount(cells[1]) for cells in rows(section(f"Settings of a {title}"))}
    assert stated == {name: field.default for name, field in settings.model_fields.items()}


def test_numbers_in_the_text_are_the_defaults() -> None:
    """Written as: `setting` (number unit) or `setting`, number unit."""
    defaults = {
        name: field.default
        for settings in (ClientSettings, ServerSettings)
        for name, field in settings.model_fields.items()
    }
    promises = " ".join(read(PAGE).partition("\n## Settings")[0].split())
    given = re.findall(r"`(\w+_\w+)`(?: \(|, )(\d[\d.]*(?: (?:s|MiB|GiB))?)", promises)
    given += [(name, f"{number} s") for number, name in re.findall(r"(\d+) s \(`(\w+)`\)", promises)]
    assert len(given) > 15
    assert [(name, text) for name, text in given if amount(text) != defaults[name]] == []


def test_numbers_of_controllers_are_the_defaults() -> None:
    policy = RestartPolicy()
    text = section("What is bounded")
    assert f"{policy.max_failures} times in a row" in text
    assert f"pauses grow to {policy.max_delay_s:g} s" in text


def test_every_case_is_there_with_tests_that_name_it() -> None:
    cases = {cells[0]: NAMED.findall(cells[2]) for cells in rows(section("Cases"))}
    assert list(cases) == [f"P{number:02}" for number in CASES]
    silent = [f"{c}: {name}" for c, tests in cases.items() for file, name in tests if c not in named_tests(file)[name]]
    assert silent == []


def test_other_pages_lead_here() -> None:
    assert "(docs/reliability.md)" in read("README.md")
    assert "(reliability.md" in read("docs/operations.md")


def amount(text: str) -> float:
    """A number with its unit, in the unit of the setting."""
    number, _, unit = text.partition(" ")
    return float(number) * UNITS[unit]
