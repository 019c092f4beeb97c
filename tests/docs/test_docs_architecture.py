"""docs/architecture.md against the code: settings with their defaults, and the packages it names."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
from doc_pages import ROOT, read, rows

from envbus.settings import GIB, INLINE_BYTES, KIB, MIB, PART_BYTES, PROBE_TIMEOUT_S, ClientSettings, ServerSettings

PAGE = "docs/architecture.md"
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "": 1}


def documented_defaults(section: str) -> dict[str, float]:
    """Return the table below a heading as ``{field: default}``."""
    text = read(PAGE).partition(f"### {section}\n")[2].partition("\n#")[0]
    found = re.findall(r"^\| `(\w+)` \| ([\d.]+) ?(\w*) \|", text, re.MULTILINE)
    return {name: float(number) * UNITS[unit] for name, number, unit in found}


@pytest.mark.parametrize("settings", [ClientSettings, ServerSettings])
def test_every_setting_is_listed_with_its_default(settings: Any) -> None:
    defaults = {name: field.default for name, field in settings.model_fields.items()}
    assert documented_defaults(settings.__name__) == defaults


def test_the_fixed_sizes_are_those_of_the_code() -> None:
    fixed = read(PAGE).partition("\nFixed: ")[2]
    expected = f"{INLINE_BYTES // KIB} KiB inline, parts of {PART_BYTES // KIB} KiB, {PROBE_TIMEOUT_S:g} s for"
    assert expected in " ".join(fixed.split())


def test_the_packages_of_the_table_exist_and_none_is_missing() -> None:
    named = {name for cells in rows(PAGE) if len(cells) == 3 for name in re.findall(r"`envbus\.(\w+)`", cells[0])}
    assert all(find_spec(f"envbus.{name}") for name in named)
    packages = {path.parent.name for path in (ROOT / "envbus").glob("*/__init__.py")}
    assert packages <= named
