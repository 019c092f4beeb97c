"""What all commands for operators share: their options, the connection, and how they print JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envbus.cli.arguments import MAX_SECONDS

if TYPE_CHECKING:
    from envbus.controller.operator import Operator

Address = Annotated[
    str | None,
    typer.Option("--address", metavar="URL", help="NATS address. Default: ENVBUS_URL, then NATS_URL."),
]
Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="CONTEXT",
        help="NATS CLI context with address and credentials: the path of its .json file, or its name.",
    ),
]
Prefix = Annotated[str, typer.Option("--prefix", help="First token of all NATS subjects.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Host = Annotated[str | None, typer.Option("--host", help="Only the controllers on this host.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=0, max=MAX_SECONDS, metavar="SECONDS", help="Wait at most so long; then exit code 1."
    ),
]


def operate(
    work: Callable[[Operator], Coroutine[Any, Any, int]],
    *,
    address: str | None,
    context: str | None,
    prefix: str,
    interrupted: int = 130,
    log_level: str = "ERROR",
    must_hear: bool = True,
) -> int:
    """Run a command with a connected Operator.

    Args:
        work: The command; its result is the exit code.
        interrupted: Exit code after Ctrl-C.
        log_level: Least level of logs that go to stderr.
        must_hear: It is of no use to a user who may not hear servers.
    """
    from envbus.cli.running import run

    async def connected() -> int:
        from envbus.bus.address import resolve_bus_options
        from envbus.controller.operator import Operator
        from envbus.logs import setup_logging
        from envbus.settings import ClientSettings

        setup_logging(log_level)
        limit_s = ClientSettings().connect_timeout_s
        options = resolve_bus_options(address, context=context)
        async with Operator(options, prefix=prefix, connect_timeout_s=limit_s) as operator:
            try:
                if must_hear:
                    for missing in await operator.check_allowed():
                        print(f"warning: {missing}", file=sys.stderr)
                return await work(operator)
            except BrokenPipeError:  # as with "| head": whoever read this has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0

    return run(connected, verbose=False, interrupted=interrupted)


def print_json(value: Any) -> None:
    """Print a value as strict JSON."""
    from envbus.evaluation.strict_json import dumps

    print(json.dumps(json.loads(dumps(value)), indent=2), flush=True)
