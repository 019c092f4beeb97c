"""What top draws, and that the terminal is as it was afterwards."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fleet_beats import beat, controller_beat
from operator_site import Site
from rich.cells import cell_len

from envbus.cli.top_keys import split_keys
from envbus.cli.top_screen import SORTS, History, ScreenState, rows_of, screen, spark
from envbus.controller.fleet import Fleet
from envbus.controller.fleet_views import FleetView


@pytest.fixture
def view() -> FleetView:
    fleet = Fleet()
    fleet.server_beat(beat("aa11" * 8, "gsm8k", in_flight=4, state="full", waiting_jobs=7, host="左" * 30), 0.0)
    fleet.server_beat(beat("bb22" * 8, "gsm8k", in_flight=1, loop_lag_s=2.0, failed=3), 0.0)
    fleet.server_beat(beat("cc33" * 8, "a-very-long-name-of-an-environment~1234abcd", fingerprint="\x1b[31m"), 0.0)
    fleet.controller_beat(controller_beat(), 0.0)
    return fleet.view(1.0)


@pytest.mark.parametrize("size", [(80, 24), (40, 8), (200, 60), (80, 6)])
def test_every_line_fits_the_terminal(view: FleetView, size: tuple[int, int]) -> None:
    rows, history = rows_of(view, "use"), History()
    for _ in range(100):
        history.sample(rows)
    drawn = screen(view, rows, history, ScreenState(), width=size[0], height=size[1], where="nats://x").plain
    lines = drawn.split("\n")
    assert len(lines) == size[1]
    assert all(cell_len(line) <= size[0] for line in lines), lines
    assert "\x1b" not in drawn


def test_the_selected_row_is_always_shown(view: FleetView) -> None:
    rows = rows_of(view, "name")
    for row in rows:
        state = ScreenState(selected=row.key)
        drawn = screen(view, rows, History(), state, width=80, height=6, where="")
        [reverse] = [span for span in drawn.spans if span.style == "reverse"]
        name = row.env.env if row.server is None else row.server.server[:8]
        assert name[:8] in drawn.plain[reverse.start : reverse.end]


@pytest.mark.parametrize("sort", SORTS)
def test_servers_stay_with_their_env_in_any_order(view: FleetView, sort: str) -> None:
    rows = rows_of(view, sort)
    assert [row.server is None for row in rows].count(True) == 2
    for row, before in zip(rows[1:], rows, strict=False):
        assert row.server is None or row.env == before.env


def test_sorting_by_lag_and_by_waiting(view: FleetView) -> None:
    def order(sort: str) -> list[str]:
        return [row.server.server[:2] for row in rows_of(view, sort) if row.server is not None]

    assert order("lag") == ["bb", "aa", "cc"]
    assert order("waiting") == ["aa", "bb", "cc"]


def test_an_outage_of_the_viewer_is_said(view: FleetView) -> None:
    rows = rows_of(view, "name")
    drawn = screen(replace(view, cut_off=True), rows, History(), ScreenState(), width=80, height=24, where="").plain
    assert drawn.startswith("CUT OFF from NATS")


def test_sparks() -> None:
    assert spark([0.0, 0.5, 1.0], 5, full=1.0) == "  ▁▅█"
    assert spark([9.0, 0.0], 1, full=9.0) == "▁"
    assert spark([], 3, full=1.0) == "   "


def test_keys() -> None:
    assert split_keys(b"s\x1b[A\x1b[Bq") == ["s", "up", "down", "q"]
    assert split_keys(b"\x1b[15~") == [], "a function key means nothing here"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_until(fd: int, text: str, limit_s: float = 15) -> str:
    seen, deadline = "", time.monotonic() + limit_s
    while text not in seen:
        assert time.monotonic() < deadline, f"no {text!r} in {seen!r}"
        if select.select([fd], [], [], 0.2)[0]:
            seen += os.read(fd, 65536).decode("utf-8", "replace")
    return seen


@pytest.mark.parametrize("end", ["q", "ctrl-c", "term"])
def test_the_terminal_is_as_before_however_top_ends(shared: Site, terminal: tuple[int, int], end: str) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        shared.cli.command("top", "--prefix", shared.prefix),
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**shared.cli.environ(shared.variables), "TERM": "xterm-256color"},
    )  # fmt: skip
    try:
        read_until(ours, "reverse-text")
        assert termios.tcgetattr(theirs)[3] & termios.ECHO == 0
        os.write(ours, b"s")
        read_until(ours, "sort: use")
        if end == "term":
            process.send_signal(signal.SIGTERM)
        elif end == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            os.write(ours, b"q")
        seen = read_until(ours, "\x1b[?1049l")
        assert process.wait(30) == 0
        assert "\x1b[?25h" in seen, "the cursor is back"
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
