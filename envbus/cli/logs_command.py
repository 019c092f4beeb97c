"""``envbus logs``: a server's log, over the bus."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from envbus.cli.operator_options import Address, AsJson, Context, Prefix, operate, print_json

if TYPE_CHECKING:
    from envbus.bus.control_messages import LogLines
    from envbus.controller.fleet_views import ServerView
    from envbus.controller.operator import Operator

FOLLOW_S = 0.5


def logs(
    server: Annotated[
        str, typer.Argument(help="The start of a server's id; or an env with one server, or with one that failed.")
    ],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is logged from now on.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, max=5000, help="Last lines to show.")] = 100,
    level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option("--level", help="First have the server log from this level on, until it ends or is told another."),
    ] = None,
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: AsJson = False,
) -> int:
    """Show a server's log, also from another host.

    It comes from the controller that launched the server, which also has that of a server that has
    ended; else from the server itself, if it was started with --log-file.
    """

    async def work(operator: Operator) -> int:
        found = await _find(operator, server)
        if level is not None:
            await _set_level(operator, found, level)
        answer = await operator.logs(found, lines=lines)
        _print(answer, as_json)
        if follow:
            await _follow(operator, found, answer.next, as_json)
        return 0

    return operate(work, address=address, context=context, prefix=prefix, interrupted=0 if follow else 130)


async def _find(operator: Operator, text: str) -> ServerView:
    from envbus.controller.targets import find_target, one_server
    from envbus.errors import NoServerError

    view = await operator.survey()
    found = one_server(view, text) or await operator.find_ended(text)
    if found is not None:
        return found
    target = find_target(view, text)  # raises for what is nothing at all, and says what there is
    raise NoServerError(f"{target.kind} {target.name!r} is not one server: name one by its id; see: envbus ls")


async def _set_level(operator: Operator, server: ServerView, level: str) -> None:
    from envbus.bus.messages import Control
    from envbus.errors import NoServerError

    if await operator.control(server, Control(action="log_level", level=level)) is None:
        raise NoServerError(f"server {server.server[:8]} has ended: its level cannot be set")


async def _follow(operator: Operator, server: ServerView, after: int, as_json: bool) -> None:
    from envbus.controller.fleet_views import PRESENT
    from envbus.errors import CallTimeoutError, NoServerError

    while True:
        now = operator.view().server(server.server)
        ended = now is None or now.state not in PRESENT
        try:
            answer = await operator.logs(now or server, lines=5000, after=after)
        except NoServerError:
            ended = True
        except CallTimeoutError:
            pass  # it stalls; what it writes meanwhile comes later
        else:
            after = answer.next
            if answer.lines:
                _print(answer, as_json)
                continue
        if ended:
            print("the server has ended", file=sys.stderr)
            return
        await asyncio.sleep(FOLLOW_S)


def _print(answer: LogLines, as_json: bool) -> None:
    if as_json:
        print_json({"server": answer.server, "lines": answer.lines, "next": answer.next})
        return
    for line in answer.lines:
        # Colours of a log may pass, orders to the terminal may not.
        print("".join(c if c.isprintable() or c == "\t" else "?" for c in line))
    sys.stdout.flush()
