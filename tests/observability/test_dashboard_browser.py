"""The dashboard in a real browser: it shows the fleet, a death within 3 s, and the loss of its own connection."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from chromium import Chromium
from processes import Processes
from small_env import do

from envbus import NATSEnvClient

ODD_NAME = "<img src=x onerror=document.title='pwned'>"
STATES = """[...document.querySelectorAll('#servers tr[data-server]')]
    .map(row => [row.dataset.server, row.querySelector('.state').dataset.state])"""
BOXES = """JSON.stringify([...document.querySelectorAll('section')]
    .map(box => Object.values(box.getBoundingClientRect().toJSON())))"""
LINK = "document.getElementById('link').dataset.link"


def state_of(shown: Any, index: int = 0) -> str:
    return shown[index][1] if len(shown) > index else ""


async def test_a_death_shows_within_3_s(chromium: str, processes: Processes, tmp_path: Path) -> None:
    one = processes.serve("reverse-text", "--max-concurrent", "3")
    processes.serve("reverse-text", "--max-concurrent", "3")
    _, url = processes.dashboard()
    async with Chromium(tmp_path / "profile") as browser:
        await browser.open(url)
        await browser.until(STATES, lambda shown: sorted(state for _, state in shown) == ["ready", "ready"])
        boxes = await browser.evaluate(BOXES)
        one.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        await browser.until(STATES, lambda shown: "gone" in dict(shown).values(), timeout_s=3.0, what="a gone server")
        assert time.monotonic() - killed < 3.0
        assert await browser.evaluate("document.querySelector('#tile-servers .big').textContent") == "1 of 2"
        assert await browser.evaluate("document.querySelector('#servers .problem').textContent")
        assert await browser.evaluate(BOXES) == boxes, "the layout jumped"
        await browser.screenshot(tmp_path / "death.png")
        assert browser.complaints == []


async def test_the_fleet_is_shown_as_it_is(chromium: str, processes: Processes, tmp_path: Path) -> None:
    """Names and types of strangers are text, never markup."""
    _, url = processes.dashboard()
    async with Chromium(tmp_path / "profile") as browser:
        await browser.open(url)
        await browser.until(LINK, lambda link: link == "live")
        hint = await browser.until("document.querySelector('#envs .empty').textContent")
        assert "envbus serve" in hint
        processes.serve("reverse-text", "--name", ODD_NAME, "--max-concurrent", "4")
        processes.run("eval", "reverse-text", "--name", ODD_NAME, "--demo-model", "-n", "4", "-r", "2", "--disable-tui")
        await browser.until("document.querySelectorAll('#recent tbody tr').length", lambda count: count >= 5)
        assert await browser.evaluate("document.querySelector('#envs td').textContent") == ODD_NAME
        assert await browser.evaluate("document.querySelector('#envs .count').textContent") == "0 / 4"
        assert "of 8 in 10 min" in await browser.evaluate("document.querySelector('#tile-failed .sub').textContent")
        assert await browser.evaluate("document.querySelectorAll('td img').length") == 0
        assert await browser.evaluate("document.querySelector('#envs .empty').textContent") == ""
        await browser.screenshot(tmp_path / "fleet.png")
        assert browser.complaints == []


async def test_waiting_clients_and_failures_are_shown(
    chromium: str, processes: Processes, nats_url: str, prefix: str, tmp_path: Path
) -> None:
    processes.serve("reverse-text", "--name", "busy", "--max-concurrent", "1")
    _, url = processes.dashboard()
    async with Chromium(tmp_path / "profile") as browser, NATSEnvClient(nats_url, name="busy", prefix=prefix) as client:
        await browser.open(url)
        await browser.until(STATES, lambda shown: state_of(shown) == "ready")
        await asyncio.gather(*(client.run_rollout(do("x"), None, "m") for _ in range(3)))
        shown = await browser.until("document.querySelector('#failures li')?.textContent")
        assert "busy" in shown
        assert shown.endswith("3")
        assert await browser.evaluate("document.getElementById('tile-failed').dataset.mood") == "bad"
        assert await browser.evaluate("document.querySelector('#recent .alarm').textContent")


async def test_lost_connections_are_shown_and_come_back(chromium: str, processes: Processes, tmp_path: Path) -> None:
    """What is shown is marked as old, at once where the browser is told and soon where it is not."""
    processes.serve("reverse-text")
    dashboard, url = processes.dashboard()
    async with Chromium(tmp_path / "profile") as browser:
        await browser.open(url)
        await browser.until(STATES, lambda shown: state_of(shown) == "ready")
        dashboard.send_signal(signal.SIGSTOP)
        await browser.until(LINK, lambda link: link == "lost", timeout_s=30)
        assert await browser.evaluate("document.body.classList.contains('stale')")
        assert "as of" in await browser.evaluate("document.getElementById('lost').textContent")
        await browser.screenshot(tmp_path / "lost.png")
        dashboard.send_signal(signal.SIGCONT)
        await browser.until(LINK, lambda link: link == "live")
        assert await browser.evaluate("document.getElementById('lost').hidden")
        dashboard.kill()
        await browser.until(LINK, lambda link: link == "lost", timeout_s=30)
        port = url.rstrip("/").rpartition(":")[2]
        processes.dashboard("--port", port)
        await browser.until(LINK, lambda link: link == "live")


async def test_light_and_dark_are_kept(chromium: str, processes: Processes, tmp_path: Path) -> None:
    _, url = processes.dashboard()
    theme = "document.documentElement.dataset.theme"
    async with Chromium(tmp_path / "profile") as browser:
        await browser.open(url)
        first = await browser.until(theme)
        await browser.evaluate("document.getElementById('theme').click()")
        other = await browser.evaluate(theme)
        assert {first, other} == {"light", "dark"}
        await browser.open(url + "?again")
        await browser.until(theme, lambda kept: kept == other)


def test_no_files_of_others_are_asked_for() -> None:
    """The page works without any network but its own server."""
    static = Path(__file__).parent.parent.parent / "envbus" / "dashboard" / "static"
    for file in static.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file
        assert "https:" not in text, file
        assert os.path.getsize(file) < 40_000
