"""``envbus doctor``: what is wrong between here, NATS and the servers, and what to change."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from envbus.cli.operator_options import Address, AsJson, Context, Prefix, operate, print_json

if TYPE_CHECKING:
    from envbus.controller.diagnosis import Finding
    from envbus.controller.operator import Operator

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "bold red"}


def doctor(
    env: Annotated[
        str | None, typer.Argument(help="Try this env's subjects. Default: those of the first env on the bus.")
    ] = None,
    role: Annotated[
        list[str],
        typer.Option(
            "--role",
            help="This user must be able to be a trainer, server, operator, controller or dashboard. Repeatable. "
            "Default: at least one of them.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    controller_id: Annotated[
        str | None, typer.Option("--controller-id", help="Try the role of a controller with this id.")
    ] = None,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Check the connection, this user's permissions, limits, clocks, versions and round trips.

    Permissions are tried by really subscribing and publishing, with questions or for ids that nobody has.
    Exit code 1 if something must be changed.
    """
    from envbus.errors import UsageError

    known = ("trainer", "server", "operator", "controller", "dashboard")
    for name in role:
        if name not in known:
            raise UsageError(f"--role {name!r}: one of {', '.join(known)}")
    return operate(
        lambda operator: _doctor(operator, env, role, controller_id, as_json),
        address=address,
        context=context,
        prefix=prefix,
        log_level="CRITICAL",
        must_hear=False,
    )


async def _doctor(
    operator: Operator, env: str | None, roles: list[str], controller_id: str | None, as_json: bool
) -> int:
    from envbus.cli.fleet_tables import output_console
    from envbus.controller.diagnosis import diagnose

    console = output_console()
    findings: list[Finding] = []
    async for finding in diagnose(operator, env=env, roles=roles, controller_id=controller_id):  # type: ignore[arg-type]
        findings.append(finding)
        if not as_json and _is_asked_for(finding, roles):
            _show(finding, console)
    failed = sum(finding.level == "failed" for finding in findings)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        console.print("all fine" if not failed else f"{failed} to change, see above")
    return 1 if failed else 0


def _is_asked_for(finding: Finding, roles: list[str]) -> bool:
    role = finding.check.removeprefix("permissions as ")
    return not roles or role == finding.check or role in roles


def _show(finding: Finding, console: object) -> None:
    from rich.console import Console
    from rich.text import Text

    from envbus.cli.fleet_tables import cell

    assert isinstance(console, Console)
    line = Text.assemble(
        cell(f"{finding.level:<8}", _STYLES[finding.level]), cell(f"{finding.check}: ", "bold"), cell(finding.found)
    )
    console.print(line, soft_wrap=True)
    if finding.advice:
        console.print(cell(f"         → {finding.advice}"), soft_wrap=True)
