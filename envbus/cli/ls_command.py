"""``envbus ls``: what is on the bus now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from envbus.cli.operator_options import Address, AsJson, Context, Prefix, operate, print_json

if TYPE_CHECKING:
    from envbus.controller.operator import Operator


def list_fleet(
    env: Annotated[str | None, typer.Argument(help="Only this env.")] = None,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """List envs, servers and controllers.

    Listens for two heartbeats, about two seconds: a rate needs two counts. "servers 3 of 5" are those
    that are there and those that controllers want; "waiting" are jobs, by so many clients.
    """
    return operate(lambda operator: _list(operator, env, as_json), address=address, context=context, prefix=prefix)


async def _list(operator: Operator, name: str | None, as_json: bool) -> int:
    from envbus.cli.fleet_tables import fleet_tables, output_console
    from envbus.controller.operator import RATE_LISTEN_S
    from envbus.controller.targets import require_env

    view = await operator.survey(listen_s=RATE_LISTEN_S)
    if name is not None:
        found = require_env(view, name)
        envs = tuple(each for each in view.envs if each.env == found)
        controllers = tuple(each for each in view.controllers if found in each.wants)
        view = replace(
            view,
            totals=envs[0].totals,
            envs=envs,
            servers=tuple(view.servers_of(found)),
            controllers=controllers,
        )
    if as_json:
        print_json(view.as_json())
    elif not view.envs and not view.controllers:
        print(
            f"no server and no controller is on the bus at {operator.options.describe()} under prefix "
            f"{operator.prefix!r}; start one with: envbus serve, or envbus up"
        )
    else:
        output_console().print(fleet_tables(view, view.envs, view.servers))
    return 0
