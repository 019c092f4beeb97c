"""What ``envbus top`` draws (pure): one line per env and server, with sparklines, in any size from 40 x 8."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.cells import set_cell_size
from rich.text import Text

from envbus.cli.fleet_tables import STATE_STYLES, age, cell
from envbus.cli.formats import plural
from envbus.controller.fleet_views import EnvView, FleetView, ServerView
from envbus.controller.targets import SHORT_ID

BARS = "▁▂▃▄▅▆▇█"
SORTS = ("name", "use", "waiting", "rate", "lag", "errors")
HISTORY = 240
"""Samples that are kept; one per second."""
_METRICS = {"use": 5, "waiting": 6, "rate": 7, "lag": 7}
"""Each with the cells of its number."""
_FULL_BAR = {"waiting": 1.0, "rate": 0.5, "lag": 0.25}
"""What a full bar stands for at least, so that noise does not look like load."""
_MIN_SPARK, _MAX_SPARK = 3, 40
_NARROW, _WIDE = 22, 38
"""Cells for names: without and with the host."""
_WIDE_FROM = 110


@dataclass(frozen=True, slots=True)
class Row:
    """One line: an env, or one of its servers."""

    env: EnvView
    server: ServerView | None = None

    @property
    def key(self) -> str:
        """Names it over time."""
        return f"env {self.env.env}" if self.server is None else f"server {self.server.server}"

    @property
    def label(self) -> str:
        """What to call it in a question."""
        return f"env {self.env.env}" if self.server is None else f"server {self.server.server[:SHORT_ID]}"

    def metric(self, name: str) -> float:
        """A number of it now."""
        if self.server is None:
            totals = self.env.totals
            return {
                "use": totals.utilisation,
                "waiting": totals.waiting_jobs,
                "rate": totals.rate_per_s,
                "lag": totals.lag_s,
                "errors": totals.failed,
            }[name]
        server = self.server
        return {
            "use": server.in_flight / server.slots if server.slots else 0.0,
            "waiting": server.waiting_jobs,
            "rate": server.rate_per_s or 0.0,
            "lag": server.lag_s,
            "errors": server.failed,
        }[name]


@dataclass(slots=True)
class History:
    """The last samples of every row."""

    samples: dict[str, dict[str, deque[float]]] = field(default_factory=dict)

    def sample(self, rows: Iterable[Row]) -> None:
        """Add one sample of each; what is gone is dropped."""
        kept: dict[str, dict[str, deque[float]]] = {}
        for row in rows:
            series = self.samples.get(row.key) or defaultdict(lambda: deque(maxlen=HISTORY))
            for name in _METRICS:
                series[name].append(row.metric(name))
            kept[row.key] = series
        self.samples = kept

    def of(self, row: Row, metric: str) -> Sequence[float]:
        """The samples of one metric, oldest first."""
        return tuple(self.samples.get(row.key, {}).get(metric, ()))


@dataclass(slots=True)
class ScreenState:
    """What the user chose, and what there is to tell."""

    sort: str = "name"
    selected: str = ""
    """Key of the row."""
    message: str = ""


def rows_of(view: FleetView, sort: str) -> list[Row]:
    """Each env with its servers below it, in order."""
    order = _by_name if sort == "name" else _by(sort)
    rows: list[Row] = []
    for env in sorted((Row(env) for env in view.envs), key=order):
        rows.append(env)
        rows += sorted((Row(env.env, server) for server in view.servers_of(env.env.env)), key=order)
    return rows


def _by_name(row: Row) -> tuple[object, ...]:
    return (row.env.env, row.server.host if row.server else "", row.server.server if row.server else "")


def _by(metric: str) -> Callable[[Row], tuple[object, ...]]:
    return lambda row: (-row.metric(metric), *_by_name(row))


def spark(values: Sequence[float], cells: int, *, full: float) -> str:
    """A line of bars, the newest at the right."""
    return "".join(BARS[round(min(1.0, max(0.0, value / full)) * 7)] for value in values[-cells:]).rjust(cells)


def screen(
    view: FleetView, rows: Sequence[Row], history: History, state: ScreenState, *, width: int, height: int, where: str
) -> Text:
    """The whole screen; ``height`` lines of ``width`` cells at most."""
    room = max(1, height - 5)
    position = next((index for index, row in enumerate(rows) if row.key == state.selected), 0)
    first = max(0, min(position - room // 2, len(rows) - room))
    names = _WIDE if width >= _WIDE_FROM else _NARROW
    left = width - names - sum(_METRICS.values()) - len(_METRICS)
    bars = min(_MAX_SPARK, max(_MIN_SPARK, left // len(_METRICS)))
    lines = [_head(view, where), _totals(view), _columns(state.sort, names, bars)]
    for index, row in enumerate(rows[first : first + room], first):
        line = _row_line(row, history, names, bars)
        if index == position:
            line.stylize("reverse")
        lines.append(line)
    if not rows:
        lines.append(Text("no server and no controller is on the bus", style="dim"))
    lines += [Text()] * (height - 2 - len(lines))
    lines.append(cell(state.message, "bold yellow") if state.message else _detail(rows[position] if rows else None))
    lines.append(_keys(state.sort, more=len(rows) - room if len(rows) > room else 0))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, end="").join(lines[:height])


def _head(view: FleetView, where: str) -> Text:
    head = Text.assemble(("envbus top", "bold"), "  ", cell(where))
    if view.cut_off:
        head = Text.assemble(("CUT OFF from NATS: shown as last heard  ", "bold red"), head)
    return head


def _totals(view: FleetView) -> Text:
    totals = view.totals
    return Text(
        f"{plural(len(view.envs), 'env')}  {plural(totals.servers, 'server')}  {totals.in_flight}/{totals.slots} slots "
        f"({totals.utilisation:.0%})  {_count(totals.waiting_jobs)} waiting  {totals.rate_per_s:.1f}/s  "
        f"{plural(totals.failed, 'error')}"
    )


def _columns(sort: str, names: int, bars: int) -> Text:
    line = Text(set_cell_size("env / server", names), style="dim")
    for name, cells in _METRICS.items():
        title = f"{name} ▼" if name == sort else name
        line.append(" " + title.rjust(bars + cells))
    return line


def _row_line(row: Row, history: History, names: int, bars: int) -> Text:
    line = _env_name(row.env, names) if row.server is None else _server_name(row.server, names)
    for name, cells in _METRICS.items():
        samples = history.of(row, name)
        full = 1.0 if name == "use" else max([_FULL_BAR[name], *samples[-bars:]])
        line.append(" ")
        line.append(spark(samples, bars, full=full), style=_bar_style(row, name))
        line.append(_value(row, name).rjust(cells))
    return line


def _bar_style(row: Row, name: str) -> str:
    return "red" if name in ("waiting", "lag") and row.metric(name) >= 1.0 else "cyan"


def _value(row: Row, name: str) -> str:
    value = row.metric(name)
    if name == "use":
        return f"{value:.0%}"
    if name == "waiting":
        return _count(int(value))
    if name == "rate":
        return f"{value:.1f}/s" if value < 100 else f"{value:.0f}/s"
    return f"{value:.2f}s" if value < 100 else age(value)


def _count(number: int) -> str:
    """At most six cells: ``9999``, ``12k``, ``3M``."""
    if number < 10_000:
        return str(number)
    if number < 10_000_000:
        return f"{number // 1000}k"
    return f"{number // 1_000_000}M" if number < 10**10 else ">9999M"


def _env_name(env: EnvView, cells: int) -> Text:
    servers = f"{env.totals.servers}" + ("" if env.wanted is None else f"/{env.wanted}")
    flags = ("*" if env.mixed else "") + ("!" if env.problems else "")
    name = set_cell_size(str(cell(env.env)), cells - len(servers) - len(flags) - 1)
    return Text.assemble((name, "bold"), (flags, "bold red"), servers, " ")


def _server_name(server: ServerView, cells: int) -> Text:
    name = f"  {cell(server.server[:SHORT_ID])} "
    if cells > _NARROW:
        name += set_cell_size(str(cell(server.host)), cells - _NARROW - 1) + " "
    return Text.assemble(set_cell_size(name, cells - 9), (f"{server.state:<8}", STATE_STYLES[server.state]), " ")


def _detail(row: Row | None) -> Text:
    if row is None:
        return Text()
    if row.server is None:
        env = row.env
        parts = [" ".join(f"{count} {state}" for state, count in env.states.items())]
        parts += [f"differ in {', '.join(env.mixed)}"] if env.mixed else []
        parts += list(env.problems[:1])
        parts.append(f"{env.totals.waiting_clients} clients wait, oldest rollout {age(env.totals.oldest_job_s)}")
    else:
        server = row.server
        parts = [f"pid {server.pid} on {server.host}", f"up {age(server.age_s)}"]
        parts += [f"{server.in_flight}/{server.slots} slots"]
        parts += [f"{server.done} done", f"{server.failed} errors", f"{server.rss_bytes // 2**20} MiB"]
        parts += [f"controller {server.controller[:SHORT_ID]}"] if server.controller else []
        parts += [server.problem] if server.problem else []
    return cell(" · ".join(" ".join(part.split()) for part in parts), "dim")


def _keys(sort: str, *, more: int) -> Text:
    line = Text()
    for key, does in (("↑↓", "select"), ("s", f"sort: {sort}"), ("d", "drain"), ("+-", "scale"), ("q", "quit")):
        line.append(key, style="bold reverse")
        line.append(f" {does}  ")
    if more:
        line.append(f"{more} more lines", style="dim")
    return line
