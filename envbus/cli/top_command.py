"""``envbus top``: the fleet live in a terminal, with keys to sort, drain and scale."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envbus.cli.operator_options import Address, Context, Prefix, operate

if TYPE_CHECKING:
    from envbus.cli.top_screen import Row
    from envbus.controller.operator import Operator

INTERVAL_S = 1.0
AIM_S = 3.0
"""For so long after + or - the next one counts from what was asked for, as the beats lag behind."""
MESSAGE_S = 6.0


def top(
    address: Address = None,
    context: Context = None,
    prefix: Prefix = "env",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per second instead.")] = False,
) -> int:
    """Watch the fleet live: slots in use, jobs that wait, rollouts per second, lag.

    Keys: arrows select, s sorts, d drains what is selected (asks first), + and - scale its env, q quits.
    """
    from envbus.errors import UsageError

    if as_json:
        return operate(_stream, address=address, context=context, prefix=prefix, interrupted=0)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("envbus top needs a terminal; elsewhere use: envbus ls, or envbus top --json")
    return operate(_watch, address=address, context=context, prefix=prefix, interrupted=0, log_level="CRITICAL")


async def _stream(operator: Operator) -> int:
    from envbus.evaluation.strict_json import dumps

    await operator.survey()
    while True:
        print(json.dumps(json.loads(dumps({"time": time.time(), **operator.view().as_json()}))), flush=True)
        await asyncio.sleep(INTERVAL_S)


async def _watch(operator: Operator) -> int:
    from rich.console import Console
    from rich.live import Live

    from envbus.cli import running
    from envbus.cli.top_keys import Keyboard

    console = Console(highlight=False)
    keyboard = Keyboard()
    running.on_force += [keyboard.restore, lambda: (console.show_cursor(True), console.set_alt_screen(False))]
    with keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        watch = _Watch(operator, live)
        try:
            await watch.run(keyboard.key)
        finally:
            await watch.close()
    return 0


class _Watch:
    """The loop of one ``envbus top``: draws once a second and after every key, and has orders carried out."""

    def __init__(self, operator: Operator, live: Any) -> None:
        from envbus.cli.top_screen import History, ScreenState

        self._operator = operator
        self._live = live
        self._history = History()
        self._state = ScreenState()
        self._rows: list[Row] = []
        self._asked: Row | None = None
        self._order: asyncio.Task[None] | None = None
        self._aims: dict[str, tuple[int, float]] = {}
        self._message_until = 0.0

    async def run(self, next_key: Any) -> None:
        """Until q."""
        key: asyncio.Task[str] | None = None
        sample_at = time.monotonic()
        try:
            while True:
                self._draw(sample=time.monotonic() >= sample_at)
                if time.monotonic() >= sample_at:
                    sample_at += INTERVAL_S
                key = key or asyncio.ensure_future(next_key())
                await asyncio.wait({key}, timeout=max(0.0, sample_at - time.monotonic()))
                if key.done():
                    if not self._on_key(key.result()):
                        return
                    key = None
        finally:
            if key is not None:
                key.cancel()
                await asyncio.gather(key, return_exceptions=True)

    async def close(self) -> None:
        """Give up an order that has no answer yet."""
        if self._order is not None:
            self._order.cancel()
            await asyncio.gather(self._order, return_exceptions=True)

    def _draw(self, *, sample: bool) -> None:
        from envbus.cli.top_screen import rows_of, screen

        view = self._operator.view()
        self._rows = rows_of(view, self._state.sort)
        if sample:
            self._history.sample(self._rows)
        if self._rows and self._selected() is None:
            self._state.selected = self._rows[0].key
        if time.monotonic() > self._message_until and self._asked is None:
            self._state.message = ""
        width, height = os.get_terminal_size(sys.stdout.fileno())
        where = f"{self._operator.options.describe()}  prefix {self._operator.prefix}"
        drawn = screen(view, self._rows, self._history, self._state, width=width, height=height, where=where)
        self._live.update(drawn, refresh=True)

    def _selected(self) -> Row | None:
        return next((row for row in self._rows if row.key == self._state.selected), None)

    def _on_key(self, key: str) -> bool:
        """Act on a key; False ends the watch."""
        from envbus.cli.top_screen import SORTS

        asked, self._asked = self._asked, None
        if asked is not None:
            self._say("")
            if key == "y":
                self._start(self._drain(asked))
        elif key in ("q", "Q", "end"):
            return False
        elif key in ("up", "k", "down", "j"):
            self._move(-1 if key in ("up", "k") else 1)
        elif key == "s":
            self._state.sort = SORTS[(SORTS.index(self._state.sort) + 1) % len(SORTS)]
        elif (row := self._selected()) is not None:
            if key == "d":
                self._asked = row
                self._state.message = f"drain {row.label}? y: yes, any other key: no"
            elif key in ("+", "-", "="):
                self._start(self._scale(row, -1 if key == "-" else 1))
        return True

    def _move(self, by: int) -> None:
        keys = [row.key for row in self._rows]
        if keys:
            position = keys.index(self._state.selected) if self._state.selected in keys else 0
            self._state.selected = keys[max(0, min(len(keys) - 1, position + by))]

    def _say(self, text: str) -> None:
        self._state.message = text
        self._message_until = time.monotonic() + MESSAGE_S

    def _start(self, order: Coroutine[Any, Any, str]) -> None:
        if self._order is not None and not self._order.done():
            order.close()
            self._say("the last order has no answer yet")
            return
        self._order = asyncio.get_running_loop().create_task(self._carry_out(order))

    async def _carry_out(self, order: Coroutine[Any, Any, str]) -> None:
        from envbus.errors import EnvbusError

        try:
            self._say(await order)
        except EnvbusError as error:
            self._say(str(error))

    async def _drain(self, row: Row) -> str:
        from envbus.controller.targets import Target

        if row.server is not None:
            target = Target("server", row.server.server, (row.server,))
        else:
            target = Target("env", row.env.env, tuple(self._operator.view().servers_of(row.env.env)))
        await self._operator.retire(target)
        return f"{row.label} is draining"

    async def _scale(self, row: Row, by: int) -> str:
        from envbus.errors import NoServerError

        env = row.env
        if env.wanted is None:
            raise NoServerError(f"no controller runs env {env.env}: it cannot be scaled from here")
        aim, until = self._aims.get(env.env, (env.wanted, 0.0))
        replicas = max(0, (aim if time.monotonic() < until else env.wanted) + by)
        self._aims[env.env] = (replicas, time.monotonic() + AIM_S)
        await self._operator.scale(env.env, replicas)
        return f"{env.env}: {env.wanted} → {replicas} servers"
