"""The ``envbus`` command: its subcommands, and how their errors and exit codes look.

Exit codes: 0 fine, 1 rollouts or the server failed, 2 usage, 130 interrupted.
Commands import what they need when they run, so that --help is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import typer
from pydantic import ValidationError

from envbus.cli.arguments import with_resume_value
from envbus.cli.call_command import call
from envbus.cli.dashboard_command import dashboard
from envbus.cli.doctor_command import doctor
from envbus.cli.eval_command import evaluate
from envbus.cli.fleet_commands import drain, restart, scale, stop
from envbus.cli.gateway_command import gateway
from envbus.cli.health_command import health
from envbus.cli.info_command import info, ping
from envbus.cli.logs_command import logs
from envbus.cli.ls_command import list_fleet
from envbus.cli.nats_command import nats_app
from envbus.cli.reporting import EXIT_USAGE, print_error, report
from envbus.cli.serve_command import serve
from envbus.cli.top_command import top
from envbus.cli.up_command import up
from envbus.errors import EnvbusError

app = typer.Typer(
    name="envbus",
    help="Serve reinforcement-learning environments on NATS, and evaluate models on them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it shows local variables, keys among them
)
app.command("serve")(serve)
app.command("up")(up)
app.command("eval")(evaluate)
app.command("gateway")(gateway)
app.command("dashboard")(dashboard)
app.command("ls")(list_fleet)
app.command("top")(top)
app.command("info")(info)
app.command("ping")(ping)
app.command("scale")(scale)
app.command("drain")(drain)
app.command("restart")(restart)
app.command("stop")(stop)
app.command("logs")(logs)
app.command("call")(call)
app.command("doctor")(doctor)
app.add_typer(nats_app, name="nats")
app.command("health")(health)

_ParserError = cast(type[Exception], typer.BadParameter.__mro__[2])
"""The base of the parser's errors; typer does not export it."""


@app.command("version")
def version() -> None:
    """Print the version of envbus."""
    from envbus import __version__

    typer.echo(f"envbus {__version__}")


def main() -> int:
    """Run the command line of this process; the exit code."""
    return run_app(app, sys.argv[1:], prog_name="envbus")


def run_app(command: typer.Typer, argv: Sequence[str], *, prog_name: str | None = None) -> int:
    """Run a command line; usage errors become one line on stderr."""
    try:
        code = command(with_resume_value(argv), standalone_mode=False, prog_name=prog_name)
    except _ParserError as error:
        return _usage_error(error)
    except (EnvbusError, ValidationError) as error:
        return report(error, verbose=False)
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


def _usage_error(error: Exception) -> int:
    message = str(error.format_message()).strip()  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    hint = f"; see {context.command_path} --help" if context is not None else ""
    if message:  # without one it was the help that nobody asked for
        print_error(f"{message.rstrip('.')}{hint}", code="usage")
    return EXIT_USAGE
