"""``envbus dashboard``: the fleet in a browser."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from envbus.cli.operator_options import Context


def dashboard(
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="URL", help="NATS address. Default: ENVBUS_URL, then NATS_URL."),
    ] = None,
    context: Context = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 takes a free one.")] = 8017,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 lets everybody who reaches this host look.")
    ] = "127.0.0.1",
    prefix: Annotated[str, typer.Option("--prefix", help="First token of all NATS subjects.")] = "env",
    log_level: Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Show the fleet live in a browser until Ctrl-C: environments, servers, load, waiting line, failures.

    It reads only. Open the printed address; leave it open on a wall if you like.
    """
    from envbus.cli.running import run

    async def work() -> int:
        from envbus.bus.address import resolve_bus_options
        from envbus.controller.operator import Operator
        from envbus.dashboard.dashboard import Dashboard
        from envbus.logs import setup_logging

        setup_logging(log_level)
        options = resolve_bus_options(address, context=context)
        async with Operator(options, prefix=prefix) as operator, Dashboard(operator, port=port, host=host) as page:
            typer.echo(f"the fleet is at {page.url}")
            await asyncio.Event().wait()
        return 0

    return run(work, verbose=verbose, interrupted=0)
