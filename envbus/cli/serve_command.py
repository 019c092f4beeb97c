"""``envbus serve``: one server process for one environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envbus.cli.arguments import MAX_SECONDS
from envbus.cli.operator_options import Context

if TYPE_CHECKING:
    from envbus.bus.address import BusOptions


def serve(
    env_id: Annotated[str, typer.Argument(help="Name of the environment, e.g. reverse-text.")],
    env_args: Annotated[
        str | None, typer.Option("-a", "--env-args", metavar="JSON", help="Arguments of its load_environment.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="URL",
            help="NATS address, e.g. nats://host:4222. Default: ENVBUS_URL, then NATS_URL; a password "
            "belongs there, where no process list shows it.",
        ),
    ] = None,
    context: Context = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Start a NATS server on this host, to try things out; prints its URL.")
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Name on the bus. Default: env_id, with arguments also their digest.")
    ] = None,
    max_concurrent: Annotated[int, typer.Option("--max-concurrent", min=1, help="Rollouts at the same time.")] = 64,
    prefix: Annotated[str, typer.Option("--prefix", help="First token of all NATS subjects.")] = "env",
    allow_key: Annotated[
        list[str],
        typer.Option(
            "--allow-key",
            metavar="VAR=ORIGIN",
            help="Let rollouts use the API key in this environment variable, at this origin only, "
            "e.g. OPENAI_API_KEY=https://api.openai.com. Repeatable.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    allow_url: Annotated[
        list[str],
        typer.Option(
            "--allow-url",
            metavar="PATTERN",
            help="Let rollouts call models without a key there, e.g. http://10.0.*:8000 or http://127.0.0.1:*. "
            "Repeatable. With --embedded this host's loopback is allowed.",
        ),
    ] = [],  # noqa: B006
    model_proxy: Annotated[
        bool,
        typer.Option("--model-proxy", help="Call models through the proxies that HTTPS_PROXY and its like name."),
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            min=0,
            max=MAX_SECONDS,
            metavar="SECONDS",
            help="How long a stop waits for running rollouts. Default: 30.",
        ),
    ] = None,
    extra_env_kwargs: Annotated[
        str | None,
        typer.Option("-x", "--extra-env-kwargs", metavar="JSON", help="Settings of the loaded environment."),
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_file: Annotated[
        str | None, typer.Option("--log-file", metavar="PATH", help="Also log to this file; it is appended to.")
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log lines as JSON objects.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", min=0, max=65535, help="Serve /metrics, /livez and /readyz over HTTP on this port."
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="HOST", help="Address to serve them on.")
    ] = "0.0.0.0",
    env_dir_path: Annotated[list[str], typer.Option("--env-dir-path", hidden=True)] = ["./environments"],  # noqa: B006
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Serve an environment on NATS until Ctrl-C or SIGTERM.

    Start as many as you like, on any hosts: they share the work. Evaluate with
    "envbus eval ENV_ID --address URL", or from Python with NATSEnvClient.
    """
    from envbus.bus.lifeline import inherited_lifeline
    from envbus.cli.running import run

    # Before anything else: processes that the environment starts must not take these for theirs.
    lifeline_fd = inherited_lifeline()
    given_args = os.environ.pop("ENVBUS_SERVE_ENV_ARGS", None)
    given_extra = os.environ.pop("ENVBUS_SERVE_EXTRA_ENV_KWARGS", None)
    server_id = os.environ.pop("ENVBUS_SERVE_SERVER_ID", None)
    controller = os.environ.pop("ENVBUS_SERVE_CONTROLLER", None)

    async def work() -> int:
        from envbus.cli.arguments import json_object
        from envbus.model_urls import LOOPBACK_PATTERNS

        options: dict[str, Any] = {
            "name": name,
            "max_concurrent": max_concurrent,
            "prefix": prefix,
            "allow_keys": allow_key,
            "allow_urls": [*allow_url, *(LOOPBACK_PATTERNS if embedded else ())],
            "model_proxy": model_proxy,
            "extra_env_kwargs": json_object(extra_env_kwargs or given_extra, "-x/--extra-env-kwargs"),
            "log_level": log_level,
            "log_file": log_file,
            "json_logs": json_logs,
            "metrics_port": metrics_port,
            "metrics_host": metrics_host,
            "lifeline_fd": lifeline_fd,
            "server_id": server_id,
            "controller": controller,
        }
        args = json_object(env_args or given_args, "-a/--env-args")
        return await _serve(
            env_id, args, options, bus=(address, context), embedded=embedded, grace_s=grace, dirs=env_dir_path
        )

    return run(work, verbose=verbose, interrupted=0)


async def _serve(
    env_id: str,
    env_args: dict[str, Any],
    options: dict[str, Any],
    *,
    bus: tuple[str | None, str | None],
    embedded: bool,
    grace_s: float | None,
    dirs: list[str],
) -> int:
    from contextlib import AsyncExitStack

    from envbus.bus.embedded import EmbeddedNats
    from envbus.environments.loader import add_env_dir
    from envbus.errors import UsageError
    from envbus.server.server import NATSEnvServer
    from envbus.server.stops import LoadInterruptedError
    from envbus.settings import ServerSettings

    if embedded and any(bus):
        raise UsageError("--embedded and --address, or --context: give only one")
    for folder in dirs:
        add_env_dir(folder, env_id)
    settings = ServerSettings() if grace_s is None else ServerSettings(grace_s=grace_s)
    async with AsyncExitStack() as stack:
        if embedded:
            nats = await stack.enter_async_context(EmbeddedNats())
            bus = nats.url, None
            typer.echo(f"NATS is at {nats.url}; try: envbus eval {env_id} --demo-model --address {nats.url}")
        server = NATSEnvServer(env_id, env_args, _options(*bus), settings=settings, **options)
        try:
            await server.run()
        except LoadInterruptedError:
            typer.echo("stopped while the environment was loading", err=True)
    return 0


def _options(address: str | None, context: str | None) -> BusOptions:
    """Where NATS is.

    Raises:
        UsageError: Nobody says so, or the address is wrong.
    """
    from envbus.bus.address import resolve_bus_options
    from envbus.errors import UsageError

    try:
        return resolve_bus_options(address, context=context)
    except UsageError as error:
        if not str(error).startswith("no NATS address"):
            raise
        raise UsageError(f"{error}; or start a NATS server here with: envbus serve --embedded") from error
