"""``envbus gateway``: the sockets that clients of verifiers connect to, in front of a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from envbus.cli.operator_options import Context

if TYPE_CHECKING:
    from envbus.adapters.gateway.gateway import Gateway
    from envbus.bus.address import BusOptions
    from envbus.http_endpoint import HttpEndpoint


def gateway(
    listen: Annotated[
        list[str],
        typer.Option("--listen", metavar="ADDRESS", help="Where to listen, e.g. tcp://127.0.0.1:5000. Repeatable."),
    ],
    env: Annotated[
        list[str],
        typer.Option(
            "--env", metavar="ENV", help="Whose fleet answers there, named as by envbus ls; one for each --listen."
        ),
    ],
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="URL", help="NATS address. Default: ENVBUS_URL, then NATS_URL."),
    ] = None,
    context: Context = None,
    prefix: Annotated[str, typer.Option("--prefix", help="First token of all NATS subjects.")] = "env",
    health: Annotated[
        str | None,
        typer.Option("--health", metavar="HOST:PORT", help="Serve /livez and /readyz over HTTP there."),
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log lines as JSON objects.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Let the clients of verifiers' own env servers (0.1 and 0.4, prime-rl) use a fleet, unchanged.

    Runs until Ctrl-C or SIGTERM. Anybody who reaches its address can run rollouts: listen where only trainers reach.
    """
    from envbus.cli.running import run

    async def work() -> int:
        from envbus.bus.address import resolve_bus_options
        from envbus.logs import setup_logging

        setup_logging(log_level, json=json_logs)
        places = _places(listen, env)
        async with _gateway(places, resolve_bus_options(address, context=context), prefix) as running:
            page = await _health_page(running, health)
            try:
                for (_, name), listener in zip(places, running.listeners, strict=True):
                    typer.echo(f"{name} is at {listener.address}")
                await asyncio.Event().wait()
            finally:
                if page is not None:
                    await page.close()
        return 0

    return run(work, verbose=verbose, interrupted=0)


def _places(listen: Sequence[str], env: Sequence[str]) -> list[tuple[str, str]]:
    from envbus.errors import UsageError

    if len(listen) != len(env):
        raise UsageError(f"{len(listen)} x --listen, {len(env)} x --env: give one --env for each --listen")
    return list(zip(listen, env, strict=True))


def _gateway(places: list[tuple[str, str]], options: BusOptions, prefix: str) -> Gateway:
    from envbus.errors import UsageError

    try:
        from envbus.adapters.gateway.gateway import Gateway
    except ModuleNotFoundError as error:
        raise UsageError(f"a gateway needs pyzmq ({error}): pip install 'envbus[gateway]'") from error
    return Gateway(places, options, prefix=prefix)


async def _health_page(gateway: Gateway, where: str | None) -> HttpEndpoint | None:
    from envbus.errors import UsageError
    from envbus.http_endpoint import Request, Response, start_http_endpoint

    if where is None:
        return None
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--health {where}: write it like 127.0.0.1:8080")

    def ready(request: Request) -> Response:
        troubles = gateway.troubles()
        lines = [f"{env}: {why}\n" for env, why in troubles.items()]
        return Response("".join(lines or ["ok\n"]).encode(), 503 if troubles else 200)

    routes = {"/livez": lambda request: Response(b"ok\n"), "/readyz": ready}
    return await start_http_endpoint(int(port), routes, host=host)
