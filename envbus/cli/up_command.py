"""``envbus up``: runs the servers of a fleet file, or of environments named on the command line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from envbus.controller.controller import Controller
    from envbus.controller.instructions import Note
    from envbus.controller.spec import FleetSpec


def up(
    targets: Annotated[
        list[str], typer.Argument(metavar="FLEET.TOML | ENV_ID...", help="A fleet file, or names of environments.")
    ],
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=0, max=1000, help="Servers per environment. Default: 1.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option("--max-concurrent", min=1, help="Rollouts at the same time per server. Default: 64.")
    ] = None,
    allow_key: Annotated[
        list[str],
        typer.Option(
            "--allow-key", metavar="VAR=ORIGIN", help="As for envbus serve; in a fleet file: allow_keys. Repeatable."
        ),
    ] = [],  # noqa: B006 - typer copies it
    allow_url: Annotated[
        list[str],
        typer.Option(
            "--allow-url",
            metavar="PATTERN",
            help="As for envbus serve; in a fleet file: allow_urls. Repeatable. "
            "With a NATS server of its own this host's loopback is allowed.",
        ),
    ] = [],  # noqa: B006
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="URL",
            help="NATS address. Default: the fleet file's, ENVBUS_URL, NATS_URL; without any a NATS server "
            "of its own on this host. A password belongs into ENVBUS_URL.",
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="CONTEXT",
            help="NATS CLI context to connect with, of the servers, too: the path of its .json file, or its name. "
            "Default: the fleet file's.",
        ),
    ] = None,
    prefix: Annotated[str | None, typer.Option("--prefix", help="First token of all NATS subjects.")] = None,
    controller_id: Annotated[
        str | None, typer.Option("--id", help="The controller's name on the bus. Default: from host and fleet file.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", help="Folder for the servers' logs. Default: envbus-logs.")
    ] = None,
    adopt: Annotated[
        bool | None,
        typer.Option("--adopt/--no-adopt", help="Servers outlive a crash of this command; the next one adopts them."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=0,
            max=65535,
            help="Serve /metrics of the whole fleet, /livez and /readyz over HTTP on this port.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan; start nothing.")] = (
        False
    ),
    as_json: Annotated[bool, typer.Option("--json", help="The plan, or what happens, as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks of errors.")] = False,
) -> int:
    """Run servers on this host until Ctrl-C or SIGTERM, and replace those that end.

    Ctrl-C lets running rollouts finish within each server's grace; a second one cancels them.
    With adopt, SIGHUP ends this command alone: the servers go on, and the next one takes them over.
    """
    from envbus.cli.running import run

    async def work() -> int:
        overrides: dict[str, dict[str, Any]] = {
            "bus": {"address": address, "context": _from_here(context), "prefix": prefix},
            "controller": {"id": controller_id, "log_dir": log_dir, "adopt": adopt, "metrics_port": metrics_port},
        }
        given: dict[str, Any] = {"replicas": replicas, "max_concurrent": max_concurrent}
        given |= {"allow_keys": allow_key or None, "allow_urls": allow_url or None}
        spec = _spec(targets, {key: value for key, value in given.items() if value is not None}, overrides)
        if dry_run:
            _print_plan(spec, as_json=as_json)
            return 0
        return await _run(spec, as_json=as_json)

    return run(work, verbose=verbose)


def _from_here(context: str | None) -> str | None:
    """A path is relative to where this command runs, not to the fleet file."""
    return str(Path(context).absolute()) if context is not None and context.endswith(".json") else context


def _spec(
    targets: list[str],
    options: dict[str, Any],
    overrides: dict[str, dict[str, Any]],
) -> FleetSpec:
    from envbus.controller.spec import fleet_of, read_fleet_file
    from envbus.errors import UsageError

    given = {
        table: {key: value for key, value in keys.items() if value is not None} for table, keys in overrides.items()
    }
    files = [target for target in targets if target.endswith(".toml")]
    if not files:
        return fleet_of(targets, **options, overrides=given)
    if len(targets) > 1:
        raise UsageError("give one fleet file, or names of environments, not both")
    if options:
        raise UsageError(
            "--replicas, --max-concurrent, --allow-key and --allow-url go with names of environments; write them into "
            "the fleet file"
        )
    return read_fleet_file(Path(files[0]), overrides=given)


async def _run(spec: FleetSpec, *, as_json: bool) -> int:
    from envbus.controller.controller import Controller

    controller = Controller(spec, tell=_tell_json if as_json else _tell_text)
    with _stopped_by_signals(controller):
        await controller.run()
    return 0


@contextlib.contextmanager
def _stopped_by_signals(controller: Controller) -> Iterator[None]:
    import asyncio
    import signal

    loop = asyncio.get_running_loop()
    actions = {signal.SIGINT: controller.stop, signal.SIGTERM: controller.stop, signal.SIGHUP: controller.leave}
    for number, action in actions.items():
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in actions:
            loop.remove_signal_handler(number)


def _tell_text(note: Note) -> None:
    import time

    mark = {"info": "", "warning": "warning: ", "error": "error: "}[note.level]
    _print(f"{time.strftime('%H:%M:%S')} {note.env}: {mark}{note.line}")


def _tell_json(note: Note) -> None:
    import time

    about = {"server": note.server} if note.server else {}
    told = {"time": time.time(), "env": note.env, "level": note.level, "text": note.text}
    _print(json.dumps({**told, **about, **note.facts}))


def _print(line: str) -> None:
    # Servers must not end because the terminal, or the reader of a pipe, has.
    with contextlib.suppress(OSError, ValueError):
        typer.echo(line)


def _print_plan(spec: FleetSpec, *, as_json: bool) -> None:
    from envbus.controller.plan import plan_of

    plan = plan_of(spec)
    if as_json:
        typer.echo(json.dumps(plan, indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    runs = Column("runs", overflow="fold")
    table = Table("env", "name on the bus", "servers", "slots each", runs, box=None, header_style="bold")
    for env in plan["envs"]:
        table.add_row(env["env_id"], env["env"], env["servers"], str(env["max_concurrent"]), " ".join(env["command"]))
    console = Console(highlight=False)
    console.print(f"controller {plan['controller']} on {plan['bus']}, logs in {plan['log_dir']}", soft_wrap=True)
    console.print(table)
    for env in plan["envs"]:
        if env["isolation"]:
            console.print(f" {env['env']}: {'; '.join(env['isolation'])}", soft_wrap=True)
