"""Clients that vanish or freeze: their rollouts are cancelled and their slots go to others."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import CLIENT_SETTINGS, HERE, READY_S, Stage, do, run

from envbus.bus.embedded import EmbeddedNats

Trainer = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """Start client processes; they are reaped."""
    started: list[subprocess.Popen[bytes]] = []

    def start(stage: Stage, items: list[Any], *, url: str | None = None) -> subprocess.Popen[bytes]:
        spec = {
            "url": url or stage.url,
            "name": stage.name,
            "prefix": stage.prefix,
            "items": items,
            "settings": CLIENT_SETTINGS,
        }
        command = [sys.executable, HERE / "stage_client.py", json.dumps(spec)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HERE.parent.parent, start_new_session=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=20)


async def all_started(stage: Stage, items: list[Any]) -> None:
    for item in items:
        await stage.event("start", item["example_id"], timeout_s=READY_S)


async def test_a_killed_client_frees_its_slots(stage: Stage, trainer: Trainer) -> None:
    """P07: within the orphan grace (1 s here) the work is cancelled, cleanup included, and a waiting call is served."""
    stage.launch()
    items = [do("slow", t=600, cleanup_s=0.1) for _ in range(4)]
    async with stage.client() as other:
        await other.wait_for_server(timeout_s=READY_S)
        dying = trainer(stage, items)
        await all_started(stage, items)
        waiting = asyncio.create_task(run(other, do()))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        before = time.monotonic()
        dying.kill()
        await asyncio.wait_for(waiting, 30)
        assert time.monotonic() - before < 20
        for item in items:
            await stage.event("cancelled", item["example_id"])
    await stage.idle()


async def test_a_frozen_client_keeps_its_jobs_up_to_the_orphan_timeout(stage: Stage, trainer: Trainer) -> None:
    """P07: its connection is there, so the grace does not apply; it gets its results when it wakes."""
    stage.launch()
    items = [do("slow", t=2) for _ in range(2)]
    process = trainer(stage, items)
    await all_started(stage, items)
    process.send_signal(signal.SIGSTOP)
    for item in items:
        await stage.event("end", item["example_id"])
    process.send_signal(signal.SIGCONT)
    assert await printed(process) == ["result", "result"]


async def test_a_client_that_was_frozen_for_too_long_is_told_so(stage: Stage, trainer: Trainer) -> None:
    """P07: after orphan_timeout_s its work is cancelled; on waking it gets LeaseExpiredError, at once."""
    stage.launch(settings={"orphan_timeout_s": 1.0})
    items = [do("slow", t=600) for _ in range(4)]
    async with stage.client() as other:
        await other.wait_for_server(timeout_s=READY_S)
        process = trainer(stage, items)
        await all_started(stage, items)
        process.send_signal(signal.SIGSTOP)
        for item in items:
            await stage.event("cancelled", item["example_id"])
        assert (await asyncio.wait_for(run(other, do()), 30))["reward"] == 1.0
        before = time.monotonic()
        process.send_signal(signal.SIGCONT)
        assert await printed(process) == ["LeaseExpiredError"] * 4
        assert time.monotonic() - before < 20
    await stage.idle()


ACCOUNTS = """
accounts {{
  FLEET {{
    users: [{{user: fleet, password: f}}]
    exports: [
      {{service: "{prefix}.>", response: stream}}
    ]
  }}
  TRAINER {{
    users: [{{user: trainer, password: t}}]
    imports: [{{service: {{account: FLEET, subject: "{prefix}.>"}}}}]
  }}
}}
"""


async def test_a_client_behind_an_account_boundary_that_dies_loses_its_jobs_too(
    tmp_path: Path, trainer: Trainer
) -> None:
    """P07: one account per trainer; where no 503 tells of its death, the time without a check decides."""
    stage = Stage("", tmp_path)
    async with EmbeddedNats(config=ACCOUNTS.format(prefix=stage.prefix)) as nats:
        stage.url = nats.url.replace("nats://", "nats://fleet:f@")
        try:
            stage.launch(settings={"orphan_timeout_s": 1.5})
            items = [do("slow", t=600) for _ in range(2)]
            process = trainer(stage, items, url=nats.url.replace("nats://", "nats://trainer:t@"))
            await all_started(stage, items)
            process.kill()
            for item in items:
                await stage.event("cancelled", item["example_id"])
            async with stage.beats() as beats:
                await beats.until(lambda now: now[0].in_flight == 0)
        finally:
            stage.close()


async def printed(process: subprocess.Popen[bytes]) -> Any:
    out, _ = await asyncio.to_thread(process.communicate, timeout=20)
    return json.loads(out)
