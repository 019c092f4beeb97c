"""``envbus info`` and ``envbus ping``: what an env is, and how far its servers are away."""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envbus.cli.operator_options import Address, AsJson, Context, Prefix, operate, print_json

if TYPE_CHECKING:
    from envbus.controller.operator import Operator


def info(
    env: Annotated[str, typer.Argument(help="Name of the env on the bus.")],
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Show what an env is: arguments, versions, fingerprints, examples, limits."""
    return operate(lambda operator: _info(operator, env, as_json), address=address, context=context, prefix=prefix)


async def _info(operator: Operator, name: str, as_json: bool) -> int:
    from envbus.cli.fleet_tables import cell, env_notes, output_console, plain_table
    from envbus.controller.targets import require_env

    view = await operator.survey()
    env = view.env(require_env(view, name))
    assert env is not None
    said = await operator.info(env.env)
    if as_json:
        print_json(
            {
                **said.__dict__,
                "fleet": {
                    name: getattr(env, name)
                    for name in ("versions", "fingerprints", "mixed", "states", "wanted", "hosts")
                },
            }
        )
        return 0
    facts: dict[str, Any] = {
        "env": env.env,
        "env id": said.env_id,
        "arguments": json.dumps(said.env_args),
        "fingerprint": ", ".join(env.fingerprints) or said.fingerprint,
        **{f"{package} version": ", ".join(found) for package, found in env.versions.items()},
        "eval examples": "none" if said.num_eval_examples is None else f"{said.num_eval_examples:,}",
        "scored in groups": {None: "still loading", True: "yes", False: "no"}[said.requires_group_rollouts],
        "servers": ", ".join(f"{count} {state}" for state, count in env.states.items()),
        "wanted": "no controller runs it" if env.wanted is None else env.wanted,
        "hosts": ", ".join(env.hosts),
        "slots": f"{env.totals.in_flight} of {env.totals.slots} in use",
        "largest input": f"{said.max_input_bytes:,} bytes",
        "largest result": f"{said.max_result_bytes:,} bytes",
    }
    table = plain_table("", "")
    table.show_header = False
    for label, value in facts.items():
        table.add_row(cell(label, "dim"), cell(value))
    console = output_console()
    console.print(table)
    for note in env_notes(env):
        for line in note.splitlines():
            console.print(cell(line, "yellow"))
    return 0


def ping(
    target: Annotated[str | None, typer.Argument(help="Env, host or server; all servers if left out.")] = None,
    count: Annotated[int, typer.Option("-c", "--count", min=1, max=1000, help="Round trips to each server.")] = 3,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Measure round trips to each server.

    Exit code 1 if one gave no answer: it stalls, is cut off, or is gone since its last heartbeat.
    """
    return operate(
        lambda operator: _ping(operator, target, count, as_json), address=address, context=context, prefix=prefix
    )


async def _ping(operator: Operator, target: str | None, count: int, as_json: bool) -> int:
    from envbus.cli.fleet_tables import cell, output_console, plain_table, state_cell
    from envbus.controller.fleet_views import PRESENT
    from envbus.controller.targets import SHORT_ID, find_target
    from envbus.errors import NoServerError

    view = await operator.survey()
    servers = [server for server in view.servers if server.state in PRESENT]
    if target is not None:
        servers = list(find_target(view, target).servers)
    if not servers:
        raise NoServerError(f"no server is on the bus at {operator.options.describe()}; start one with: envbus serve")
    answers = await operator.round_trips(servers, count)
    if as_json:
        print_json(
            [
                {
                    "server": answer.server.server,
                    "env": answer.server.env,
                    "host": answer.server.host,
                    "round_trips_s": answer.seconds,
                    "error": answer.error,
                }
                for answer in answers
            ]
        )
    else:
        numbers = ("least", "median", "most")
        table = plain_table("server", "env", "host", "state", *numbers, "", right=numbers)
        for answer in answers:
            trips, server = answer.seconds, answer.server
            times = [f"{of(trips) * 1000:.1f} ms" if trips else "-" for of in (min, statistics.median, max)]
            table.add_row(
                cell(server.server[:SHORT_ID]),
                cell(server.env),
                cell(server.host),
                state_cell(server.state),
                *times,
                cell(answer.error or "", "red"),
            )
        output_console().print(table)
    return 1 if any(answer.error for answer in answers) else 0
