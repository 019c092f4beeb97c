"""``envbus scale``, ``drain``, ``restart`` and ``stop``: orders to controllers and servers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envbus.cli.formats import plural
from envbus.cli.operator_options import Address, AsJson, Context, Host, Prefix, Timeout, operate, print_json

if TYPE_CHECKING:
    from envbus.controller.fleet_views import FleetView, ServerView
    from envbus.controller.operator import Operator

TIMEOUT_S = 900.0


def scale(
    env: Annotated[str, typer.Argument(help="Name of the env on the bus.")],
    replicas: Annotated[int, typer.Argument(min=0, max=100_000, metavar="N", help="Servers to run.")],
    host: Host = None,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Run N servers of an env.

    The controllers that run it share them evenly. With --host, N is for that host's controllers
    alone and the others stay as they are. Fewer servers: those that go finish their rollouts first.
    """

    async def work(operator: Operator) -> int:
        from envbus.controller.targets import require_env

        before = await operator.survey()
        name = require_env(before, env)
        shares = await operator.scale(name, replicas, host=host)
        _tell_shares(before, name, shares, as_json)
        return 0

    return operate(work, address=address, context=context, prefix=prefix)


def _tell_shares(before: FleetView, env: str, shares: dict[str, int], as_json: bool) -> None:
    told: list[dict[str, Any]] = [
        {
            "controller": each.controller,
            "host": each.host,
            "before": each.wants[env],
            "replicas": shares[each.controller],
        }
        for each in before.controllers
        if each.controller in shares
    ]
    if as_json:
        print_json({"env": env, "controllers": told})
        return
    for one in told:
        print(f"{env} on {one['host']} (controller {one['controller'][:8]}): {one['before']} → {one['replicas']}")


def drain(
    target: Annotated[str, typer.Argument(help="An env, a host, or the start of a server's id.")],
    timeout: Timeout = TIMEOUT_S,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Have servers finish their rollouts, however long these take, and end; waits until they are gone.

    They take no more jobs. Of an env or a host that controllers run, they then want 0 servers: bring them
    back with "envbus scale". A single server of a controller is replaced.
    """

    async def work(operator: Operator) -> int:
        from envbus.controller.targets import find_target

        found = find_target(await operator.survey(), target)
        leaving = await operator.retire(found)
        return await _await_end(operator, leaving, timeout_s=timeout, as_json=as_json)

    return operate(work, address=address, context=context, prefix=prefix)


def stop(
    target: Annotated[str | None, typer.Argument(help="An env, a host, or the start of a server's id.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All servers and controllers under the prefix.")] = False,
    timeout: Timeout = TIMEOUT_S,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Stop a host with its controllers, or with --all everything; an env or a server as "envbus drain" does.

    A controller gives running rollouts each server's grace (30 s by default); clients send what is cut off
    elsewhere. Waits until the servers are gone.
    """
    from envbus.errors import UsageError

    if (target is None) != everything:
        raise UsageError("envbus stop: name an env or a host, or give --all for every server and controller")

    async def work(operator: Operator) -> int:
        from envbus.controller.targets import find_target

        view = await operator.survey()
        leaving = await operator.stop(find_target(view, target) if target is not None else None)
        return await _await_end(operator, leaving, timeout_s=timeout, as_json=as_json)

    return operate(work, address=address, context=context, prefix=prefix)


def restart(
    env: Annotated[str, typer.Argument(help="Name of the env on the bus.")],
    host: Host = None,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Replace the servers of an env one by one; each new one is ready before an old one drains.

    Returns when the controllers have taken the order; watch it with "envbus top".
    """

    async def work(operator: Operator) -> int:
        from envbus.controller.targets import require_env

        view = await operator.survey()
        name = require_env(view, env)
        told = await operator.restart(name, host=host)
        if as_json:
            print_json({"env": name, "controllers": told})
        else:
            count = sum(server.controller in told for server in view.servers_of(name))
            print(f"{name}: {count} servers are being replaced one by one; watch it with: envbus top")
        return 0

    return operate(work, address=address, context=context, prefix=prefix)


async def _await_end(operator: Operator, servers: list[ServerView], *, timeout_s: float, as_json: bool) -> int:
    said = ""

    def progress(left: list[ServerView]) -> None:
        nonlocal said
        text = _left_text(left)
        if text != said and left:
            print(text, file=sys.stderr if as_json else sys.stdout, flush=True)
        said = text

    left = await operator.until_gone(servers, timeout_s=timeout_s, progress=progress)
    if as_json:
        print_json({"ended": len(servers) - len(left), "left": [server.server for server in left]})
    elif left:
        print(f"after {timeout_s:g} s still there: {', '.join(server.server for server in left)}; see: envbus ls")
    else:
        print(f"{len(servers)} {'server has' if len(servers) == 1 else 'servers have'} ended")
    return 1 if left else 0


def _left_text(left: list[ServerView]) -> str:
    from envbus.cli.fleet_tables import age

    in_flight = sum(server.in_flight for server in left)
    held = sum(server.held_results for server in left)
    oldest = max((server.oldest_job_s for server in left), default=0.0)
    return (
        f"waiting for {plural(len(left), 'server')}: {plural(in_flight, 'rollout')} in flight, "
        f"the oldest for {age(oldest)}, {plural(held, 'result')} to be collected"
    )
