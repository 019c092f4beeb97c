"""Wrong values of every option of every command: exit code 2 and one sentence that names it, never a traceback."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from cli_forks import CliForks

from envbus.cli.main import app

COMMANDS: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ARGUMENTS = {
    "serve": ["reverse-text"],
    "up": ["reverse-text"],
    "eval": ["reverse-text", "--demo-model"],
    "info": ["e"],
    "ping": ["e"],
    "scale": ["e", "2"],
    "drain": ["e"],
    "restart": ["e"],
    "stop": ["e"],
    "logs": ["abc"],
    "call": ["e"],
}

DEEP = "[" * 100_000
NOT_JSON = ("[1]", DEEP, '{"a": 1' + "0" * 5_000 + "}")


def closed_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"nats://127.0.0.1:{taken.getsockname()[1]}"


def command_lines() -> Iterator[tuple[str, list[str], str]]:
    """Yield ``(what, arguments, word that the sentence must hold)``."""
    for command in COMMANDS:
        base = [command, *ARGUMENTS.get(command, [])]
        yield f"{command} unknown flag", [*base, "--no-such-flag"], "--no-such-flag"
        if any(parameter.required for parameter in COMMANDS[command].params):
            yield f"{command} without arguments", [command], "missing"
        for name in NUMBERS.get(command, ()):
            for value in ("nan", "1e999") if name in FLOATS else ("x",):
                yield f"{command} {name} {value[:20]!r}", [*base, name, value], name
        for name in JSON.get(command, ()):
            for value in NOT_JSON:
                yield f"{command} {name} {value[:20]!r}", [*base, name, value], name
    for replicas in ("-1", "x", "100001", "nan"):
        yield f"scale {replicas}", ["scale", "e", "--", replicas], "'n'"
    for name, value in OUT_OF_RANGE:
        command, option = name.split()
        yield f"{name} {value}", [command, *ARGUMENTS.get(command, []), option, value], option
    for command in ("serve", "up", "eval", "ls", "call"):
        base = [command, *ARGUMENTS.get(command, [])]
        for value in ("a b", ""):
            yield f"{command} --prefix {value!r}", [*base, "--prefix", value], "prefix"
        for value in ("http://h", "nats://u:secret@h/p"):
            yield f"{command} --address {value}", [*base, "--address", value], "address"


NUMBERS = {
    "serve": ["--max-concurrent", "--grace", "--metrics-port"],
    "up": ["--replicas", "--max-concurrent", "--metrics-port"],
    "eval": ["-n", "-r", "-c", "--timeout", "--max-retries", "-t", "-T", "-w"],
    "dashboard": ["--port"],
    "ping": ["-c"],
    "drain": ["--timeout"],
    "stop": ["--timeout"],
    "logs": ["-n"],
    "call": ["--timeout", "-i"],
}
FLOATS = ("--grace", "--timeout", "-T")
JSON = {"serve": ["-a", "-x"], "eval": ["-a", "-x", "-S"], "call": ["-S", "--input"]}
OUT_OF_RANGE = [
    ("serve --max-concurrent", "0"),
    ("serve --grace", "-1"),
    ("serve --metrics-port", "65536"),
    ("up --replicas", "-1"),
    ("up --max-concurrent", "0"),
    ("up --metrics-port", "-1"),
    ("eval -n", "-2"),
    ("eval -r", "0"),
    ("eval -c", "-2"),
    ("eval --timeout", "-1"),
    ("eval --max-retries", "-1"),
    ("eval -w", "0"),
    ("dashboard --port", "65536"),
    ("ping -c", "0"),
    ("drain --timeout", "-1"),
    ("logs -n", "0"),
    ("call --timeout", "-1"),
    ("call -i", "-1"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, cli_forks: CliForks) -> dict[str, tuple[int, str]]:
    """Every command line, run; none reaches a bus."""
    lines = {what: arguments for what, arguments, _ in command_lines()}
    environ = {**os.environ, "ENVBUS_URL": closed_address(), "ENVBUS_CLIENT_CONNECT_TIMEOUT_S": "0.2", "COLUMNS": "200"}
    done = cli_forks.run(lines.values(), folder=tmp_path_factory.mktemp("lines"), environ=environ, timeout_s=30)
    return {what: (code, err) for what, (code, _, err) in zip(lines, done, strict=True)}


def test_every_wrong_command_line_is_one_sentence(ended: dict[str, tuple[int, str]]) -> None:
    """P58 and bad input for people: what it is about is named, and no secret is."""
    wrong = {}
    for what, _, word in command_lines():
        code, err = ended[what]
        lines = [line for line in err.splitlines() if "WARNING" not in line]
        fine = code == 2 and len(lines) == 1 and lines[0].startswith("error[") and word.lower() in err.lower()
        if not fine or len(err) > 1_000 or "secret" in err:
            wrong[what] = f"exit {code}, wanted 2 and {word!r}: {err[:100]} … {err[-300:]}"
    assert not wrong, f"{len(wrong)} of {len(ended)}:\n" + "\n".join(f"{what}: {why}" for what, why in wrong.items())


def test_every_command_is_looked_at() -> None:
    assert {what.split()[0] for what, _, _ in command_lines()} == set(COMMANDS)
