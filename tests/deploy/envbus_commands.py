"""What the command line of envbus says of a command in a container: its options, and the port that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
from typer.main import get_command

from envbus.cli.main import app
from envbus.controller.spec import read_fleet_file
from envbus.errors import UsageError

PAGES = {"/livez", "/readyz"}
_COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
_UsageProblem = typer.BadParameter.__mro__[2]


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """Parameters by name, as envbus itself would read them.

    Raises:
        UsageError: It would refuse them.
    """
    name, *rest = arguments
    commands = _COMMANDS
    while hasattr(commands.get(name), "commands"):
        commands, (name, *rest) = commands[name].commands, rest
    if name not in commands:
        raise UsageError(f"envbus has no command {name!r}")
    try:
        context = commands[name].make_context(name, rest)
    except _UsageProblem as error:
        raise UsageError(f"envbus {name}: {error.format_message()}") from error  # type: ignore[attr-defined]
    return dict(context.params)


def http_port(arguments: Sequence[str], *, fleet_file: Path | None = None) -> int | None:
    """The port of the health pages that a command serves; None: no port.

    Args:
        fleet_file: The one that the command names, where it is here.
    """
    options = parsed(arguments)
    if arguments[0] == "dashboard":
        return int(options["port"])
    if options.get("metrics_port") is None and fleet_file is not None:
        return read_fleet_file(fleet_file).controller.metrics_port
    return options.get("metrics_port")


def health_problems(check: Sequence[str], port: int | None) -> Iterator[str]:
    """What is wrong with a health check by ``envbus health`` of a process that serves its pages on a port."""
    program, *arguments = check
    if program != "envbus" or arguments[:1] != ["health"]:
        yield f"the health check {' '.join(check)!r} is not envbus health"
        return
    try:
        url = urlsplit(parsed(arguments)["url"])
    except UsageError as error:
        yield f"health check: {error}"
        return
    if (url.scheme, url.hostname) != ("http", "127.0.0.1") or url.path not in PAGES:
        yield f"the health check asks {url.geturl()}, which is no health page of this container"
    elif url.port != port:
        yield f"the health check asks port {url.port}, but the health pages are on port {port}"
