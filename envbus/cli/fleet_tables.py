"""Tables of envs, servers and controllers, for people."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from envbus.controller.fleet_views import ControllerView, EnvView, FleetView, ServerView
from envbus.controller.targets import SHORT_ID

PIPE_WIDTH = 160
STATE_STYLES = {
    "ready": "green",
    "full": "cyan",
    "loading": "blue",
    "lagging": "yellow",
    "suspect": "bold yellow",
    "draining": "magenta",
    "gone": "dim",
    "failed": "bold red",
    "up": "green",
}
_MAX_QUOTED_LINES = 12
_MAX_NOTE_CHARS = 300


def output_console() -> Console:
    """Standard output; where it is no terminal, wide enough that no cell is cut."""
    console = Console(highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_WIDTH
    return console


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; the named columns hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def cell(value: object, style: str = "") -> Text:
    """Text of others: no markup, and nothing that a terminal would obey."""
    return Text("".join(c if c.isprintable() else "?" for c in str(value)), style=style)


def state_cell(state: str) -> Text:
    """A state in its colour."""
    return cell(state, STATE_STYLES.get(state, ""))


def age(seconds: float | None) -> str:
    """``9s``, ``3m05``, ``2h10``, ``4d``."""
    if seconds is None:
        return "-"
    whole_s = int(seconds)
    if whole_s < 60:
        return f"{whole_s}s"
    if whole_s < 3600:
        return f"{whole_s // 60}m{whole_s % 60:02d}"
    if whole_s < 86_400:
        return f"{whole_s // 3600}h{whole_s % 3600 // 60:02d}"
    return f"{whole_s // 86_400}d"


def rate(per_s: float | None) -> str:
    """``12.3/s``, or a dash while it is unknown."""
    return "-" if per_s is None else f"{per_s:.1f}/s"


def fleet_tables(view: FleetView, envs: Sequence[EnvView], servers: Sequence[ServerView]) -> RenderableType:
    """All that ``envbus ls`` shows."""
    parts: list[RenderableType] = [env_table(envs), Text(), server_table(servers)]
    if view.controllers:
        parts += [Text(), controller_table(view.controllers)]
    notes = [cell(line, "yellow") for env in envs for note in env_notes(env) for line in note.splitlines()]
    return Group(*parts, *([Text(), *notes] if notes else []))


def env_table(envs: Iterable[EnvView]) -> Table:
    """One row per env."""
    numbers = ("slots", "in flight", "waiting", "clients", "rate", "errors", "oldest", "lag")
    table = plain_table("env", "servers", "states", *numbers, right=numbers)
    for env in envs:
        totals = env.totals
        table.add_row(
            cell(env.env, "bold"),
            f"{totals.servers}"
            + ("" if env.wanted is None else f" of {env.wanted}")
            + (" auto" if env.autoscale else ""),
            Text(" ").join(
                cell(f"{count} {state}", STATE_STYLES.get(state, "")) for state, count in env.states.items()
            ),
            str(totals.slots),
            str(totals.in_flight),
            str(totals.waiting_jobs),
            str(totals.waiting_clients),
            rate(totals.rate_per_s),
            cell(totals.failed, "red" if totals.failed else ""),
            age(totals.oldest_job_s),
            f"{totals.lag_s:.2f}s" if totals.lag_s < 100 else age(totals.lag_s),
        )
    return table


def server_table(servers: Iterable[ServerView]) -> Table:
    """One row per server."""
    numbers = ("slots", "in flight", "waiting", "rate", "errors", "age")
    table = plain_table("server", "env", "host", "pid", "state", *numbers, "controller", right=("pid", *numbers))
    for server in servers:
        table.add_row(
            cell(server.server[:SHORT_ID]),
            cell(server.env),
            cell(server.host),
            str(server.pid or "-"),
            state_cell(server.state) + (cell(" (memory)", "yellow") if server.short_of_memory else ""),
            str(server.slots),
            str(server.in_flight),
            str(server.waiting_jobs),
            rate(server.rate_per_s),
            cell(server.failed, "red" if server.failed else ""),
            age(server.age_s),
            cell(server.controller[:SHORT_ID] if server.controller else "-"),
        )
    return table


def controller_table(controllers: Iterable[ControllerView]) -> Table:
    """One row per controller."""
    table = plain_table("controller", "host", "state", "processes", "restarts", "version", "wants")
    for each in controllers:
        table.add_row(
            cell(each.controller[:SHORT_ID]),
            cell(each.host),
            state_cell(each.state),
            str(each.processes),
            str(each.restarts),
            cell(each.version),
            cell(", ".join(f"{env} {count}" for env, count in each.wants.items()) or "-"),
        )
    return table


def env_notes(env: EnvView) -> Iterator[str]:
    """What an operator should look at."""
    for what in env.mixed:
        found = env.fingerprints if what == "fingerprint" else env.versions.get(what, ())
        yield f"{env.env}: servers differ in {what}: {', '.join(found)}"
    for problem in env.problems:
        first, *quoted = problem.splitlines() or [""]
        lines = [f"{env.env}: {first}", *quoted[-_MAX_QUOTED_LINES:]]
        yield "\n".join(line[:_MAX_NOTE_CHARS] for line in lines)
