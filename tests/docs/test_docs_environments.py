"""docs/environments.md against the code: its values, bundled environments and errors."""

from __future__ import annotations

import inspect
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import numpy
import pytest
from doc_pages import ROOT, read, table

from envbus.bus.codec import decode, encode
from envbus.environments.loader import HOSTABLE_METHODS
from envbus.errors import EnvironmentLoadError

PAGE = "docs/environments.md"
NAMES: dict[str, Any] = {
    "date": date,
    "datetime": datetime,
    "Decimal": Decimal,
    "Enum": Enum,
    "numpy": numpy,
    "PurePosixPath": PurePosixPath,
    "UTC": UTC,
    "UUID": UUID,
}


VALUES = [(cells[0].strip("`"), cells[1].strip("`")) for cells in table(PAGE, "value")]


@pytest.mark.parametrize(("value", "arrives"), VALUES)
def test_a_value_arrives_as_the_table_says(value: str, arrives: str) -> None:
    """P38, P41."""
    got, expected = decode(encode(eval(value, NAMES))), eval(arrives, NAMES)
    assert (got, type(got)) == (expected, type(expected))


def test_the_table_of_values_was_read() -> None:
    assert len(VALUES) > 15


def test_each_bundled_environment_is_listed_with_its_arguments() -> None:
    listed = {cells[0].strip("`"): re.findall(r"`(\w+)`", cells[2]) for cells in table(PAGE, "id")}
    files = (ROOT / "envbus/environments/bundled").glob("[a-z]*.py")
    assert set(listed) == {file.stem.replace("_", "-") for file in files}
    for env_id, arguments in listed.items():
        module = import_module(f"envbus.environments.bundled.{env_id.replace('-', '_')}")
        assert arguments == list(inspect.signature(module.load_environment).parameters)


def test_the_errors_of_load_environment_are_all_of_them() -> None:
    assert {cells[0].strip("`") for cells in table(PAGE, "error")} == {
        cls.__name__ for cls in EnvironmentLoadError.__subclasses__()
    }


def test_the_hosting_protocol_is_what_servers_check() -> None:
    text = read(PAGE).partition("## Hosting protocol")[2]
    members = re.findall(r"^\| `(?:async )?(\w+)", text, re.MULTILINE)[: len(HOSTABLE_METHODS)]
    assert members == list(HOSTABLE_METHODS)
