"""What an eval says while no rollout ends: its servers, or NATS, are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Beat
from envbus.cli.display import EvalDisplay
from envbus.cli.eval_run import _tell_absence, absence_text
from envbus.client import NATSEnvClient


def beat(state: str, *, short: bool = False) -> Beat:
    return cast(Any, Beat).model_construct(state=state, short_of_memory=short)


@pytest.mark.parametrize(
    ("servers", "was_there", "text"),
    [
        ([], False, "no server of env 'x' is there yet; waiting a while for one"),
        ([], True, "no server of env 'x' is heard any more; waiting a while for one to come back"),
        ([beat("full")], True, "the server of env 'x' is full; this run waits in line"),
        ([beat("full"), beat("draining")], True, "all 2 servers of env 'x' are full; this run waits in line"),
        ([beat("full", short=True)], True, "the server of env 'x' is full (memory): results wait to be collected"),
        ([beat("ready"), beat("full")], True, ""),
    ],
)
def test_who_is_waited_for(servers: list[Beat], was_there: bool, text: str) -> None:
    said = absence_text("x", servers, was_there=was_there)
    assert said.startswith(text)
    assert bool(said) == bool(text)


class Display:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.said: list[str] = []
        self._news = asyncio.Event()

    def status(self, text: str) -> None:
        self.said.append(text)
        self._news.set()

    async def until(self, is_enough: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_enough(self.said):
                self._news.clear()
                await self._news.wait()


async def test_without_nats_it_is_nats_that_is_waited_for(own_nats: EmbeddedNats, tmp_path: Path) -> None:
    """P24: that no server is heard meanwhile says nothing of the servers."""
    display = Display()
    async with NATSEnvClient(own_nats.url, "x") as client:
        telling = asyncio.create_task(_tell_absence(client, cast(EvalDisplay, display)))
        try:
            await display.until(bool)
            assert client.is_connected
            display.said.clear()
            await own_nats.kill()
            await display.until(bool)
            assert all("waiting for NATS" in text for text in display.said)
            await own_nats.restart()
            await display.until(lambda said: "no server" in said[-1])
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
