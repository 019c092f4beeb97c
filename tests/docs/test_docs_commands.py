"""The commands of the documentation: flags are listed, README's command 1 prints what README shows, servers by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from doc_pages import marked, read
from doc_runs import NATS_IN_DOCS, run_process
from typer.main import get_command

from envbus import ClientSettings, NATSEnvClient
from envbus.bus.embedded import EmbeddedNats
from envbus.cli.eval_command import evaluate
from envbus.cli.main import app
from envbus.errors import BusError

FLAG = re.compile(r"`(--?[a-zA-Z][\w-]*)`")


def flags_of(command: object) -> set[str]:
    options = [param for param in command.params if not getattr(param, "hidden", False)]  # type: ignore[attr-defined]
    return {name for option in options for name in option.opts if name.startswith("-")} - {"--help"}


def flags_in_table(page: str) -> set[str]:
    """Return the flags in the first cells of the table that starts with ``flag``."""
    body = read(page).partition("\n| flag |")[2].partition("\n\n")[0]
    return {flag for line in body.splitlines() for flag in FLAG.findall(line.split("|")[1:2][0] if "|" in line else "")}


@pytest.mark.parametrize(
    ("page", "command"),
    [("docs/evaluation.md", "eval"), ("deploy/README.md", "serve"), ("docs/gateway.md", "gateway")],
)
def test_a_command_has_exactly_the_flags_of_its_table(page: str, command: str) -> None:
    assert flags_in_table(page) == flags_of(get_command(app).commands[command])  # type: ignore[attr-defined]


def test_vf_eval_has_the_same_flags() -> None:
    script = typer.Typer(add_completion=False)
    script.command()(evaluate)
    assert flags_of(get_command(script)) == flags_in_table("docs/evaluation.md")


async def test_command_1_prints_what_the_readme_shows(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary, line by line; numbers may differ."""
    monkeypatch.setenv("COLUMNS", "80")
    command = read("README.md").partition("pip install -e . && ")[2].partition("\n")[0]
    printed = await run_process("sh", "-euc", command, place="README.md")
    assert shape(printed) == shape(marked("README.md", "output").text)


def shape(output: str) -> list[str]:
    """Return the lines of the summary with numbers, rules and spaces made alike."""
    start = output.index("reverse-text · demo-model")
    lines = [re.sub(r"\d[\d.,]*", "#", line).rstrip("─ ") for line in output[start:].splitlines()]
    return [" ".join(line.split()) for line in lines]


async def test_servers_by_hand_as_the_readme_says(reader: Path, own_nats: EmbeddedNats) -> None:
    """The block of README, but for the NATS server; its servers are stopped as a user would."""
    commands = marked("README.md", "servers").text.removeprefix("nats-server &\n")
    printed = await run_process("sh", "-euc", commands.replace(NATS_IN_DOCS, own_nats.url), place="README.md")
    assert "0 of 15 failed" in printed


async def test_an_access_as_the_readme_makes_it(reader: Path) -> None:
    """Each user of the block has a context; deploy/nats walks through the use of them."""
    await run_process("sh", "-euc", marked("README.md", "nats").text, place="README.md")
    made = {context.stem for context in (reader / "access" / "contexts").iterdir()}
    assert made == {"gpu1", "gpu2", "alice", "bob", "ops"}


async def test_the_nats_configuration_asks_for_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUS_NATS_PASSWORD", "s3cret")
    config = marked("deploy/README.md", "nats.conf").text.replace("port: 4222\n", "")
    async with EmbeddedNats(config=config) as nats:
        with pytest.raises(BusError):
            await NATSEnvClient(nats.url, "any", settings=ClientSettings(connect_timeout_s=0.5)).connect()
        async with NATSEnvClient(nats.url.replace("//", "//envbus:s3cret@"), "any"):
            pass
