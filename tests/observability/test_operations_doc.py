"""docs/operations.md against the code: its commands, fleet file, metrics and states are real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
from test_metrics import page
from typer.main import get_command

from envbus.cli.main import app
from envbus.controller.fleet_views import ServerState
from envbus.controller.isolation import Isolation, Limits
from envbus.controller.spec import read_fleet_file

TEXT = (Path(__file__).parent.parent.parent / "docs" / "operations.md").read_text(encoding="utf-8")
COMMANDS: Any = get_command(app)


def block(mark: str) -> str:
    """The fenced block with a mark."""
    found = re.search(rf"^```\w+ {re.escape(mark)}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def commands() -> list[str]:
    """Every command line of the page: in its shell blocks, and in `code`."""
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)).splitlines()
    inline = re.findall(r"`(envbus [a-z]+[^`]*)`", TEXT.replace("\n", " "))
    return [line for line in [*shell, *inline] if line.startswith("envbus ")]


def table(head: str) -> list[str]:
    """The first cells of a table."""
    body = TEXT.partition(f"\n| {head} |")[2].partition("\n\n")[0]
    return [line.split("|")[1].strip().strip("`") for line in body.splitlines()[2:]]


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_each_command_is_one_that_the_command_line_takes(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = COMMANDS.commands[name]
    if arguments:
        command.make_context(name, arguments)


def test_the_fleet_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(block("fleet.toml"))
    assert [env.id for env in read_fleet_file(file).env] == ["reverse-text", "guess-number"]


def test_the_isolated_fleet_file_is_read_and_the_table_has_every_key(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(block("isolated.toml"))
    assert read_fleet_file(file).env[0].user == "envs"
    keys = {*Isolation.model_fields, *(f"limits.{key}" for key in Limits.model_fields)} - {"limits"}
    told = {key for cell in table("key") for key in cell.replace("`", "").split(", ")}
    assert told == keys


def test_the_table_has_every_metric_with_its_type() -> None:
    rows = re.findall(r"^\| `(envbus_\w+)` \| (\w+) \|", TEXT, re.MULTILINE)
    real = re.findall(r"^# TYPE (\w+) (\w+)$", page(), re.MULTILINE)
    assert sorted(rows) == sorted(real)


def test_the_table_has_every_state() -> None:
    assert set(table("state")) == set(get_args(ServerState))
