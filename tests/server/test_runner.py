"""The last resort of a server's runner: whatever ends the task of a job, its outcome is reported (P04, P30)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from envbus.bus.bodies import BodyWorkers
from envbus.bus.messages import Failure
from envbus.bus.transfer import Packed
from envbus.environments import progress
from envbus.server.model_endpoints import KeyPolicy, ModelEndpoints
from envbus.server.runner import Runner, Tally, Work

WAIT_S = 20


class Closing:
    """Its rollouts end as a generator does that is closed."""

    requires_group_rollouts = False

    async def run_rollout(self, *arguments: Any, **options: Any) -> Any:
        raise GeneratorExit("closed")


class Reporting:
    """Reports more than its caller takes, and once more when it is cancelled."""

    requires_group_rollouts = False

    def __init__(self) -> None:
        self.began = asyncio.Event()

    async def run_rollout(self, *arguments: Any, **options: Any) -> Any:
        await progress.report({"data": "x" * 2000})
        self.began.set()
        try:
            await progress.report({})
        finally:
            await progress.report({})


@pytest.fixture
def workers() -> Iterator[BodyWorkers]:
    made = BodyWorkers()
    yield made
    made.stop()


async def test_what_is_no_exception_ends_its_job_too(workers: BodyWorkers, caplog: pytest.LogCaptureFixture) -> None:
    reports: asyncio.Queue[tuple[str, Packed | Failure, Tally]] = asyncio.Queue()
    runner = Runner(
        cast(Any, Closing()),
        endpoints=ModelEndpoints(KeyPolicy()),
        workers=workers,
        report=lambda *report: reports.put_nowait(report),
        progress=lambda *progress: None,
        progress_window_bytes=1024,
        server_id="server",
        env="env",
    )
    runner.start(Work("job", 1, call={"input": {"prompt": [], "example_id": 1}}))
    async with asyncio.timeout(WAIT_S):
        job, outcome, tally = await reports.get()
    assert isinstance(outcome, Failure)
    assert (job, outcome.message, outcome.causes[0], tally.failed) == ("job", "closed", ("GeneratorExit", "closed"), 1)
    assert reports.empty()
    await runner.stop(timeout_s=1)
    assert "without an outcome" in caplog.text


async def test_a_cancelled_job_that_reports_in_its_cleanup_ends(workers: BodyWorkers) -> None:
    """Nobody takes its progress any more, and its window is full."""
    reports: asyncio.Queue[tuple[str, Packed | Failure, Tally]] = asyncio.Queue()
    environment = Reporting()
    runner = Runner(
        cast(Any, environment),
        endpoints=ModelEndpoints(KeyPolicy()),
        workers=workers,
        report=lambda *report: reports.put_nowait(report),
        progress=lambda *progress: None,
        progress_window_bytes=1024,
        server_id="server",
        env="env",
    )
    runner.start(Work("job", 1, call={"input": {"prompt": [], "example_id": 1}}, progress=1))
    async with asyncio.timeout(WAIT_S):
        await environment.began.wait()
        runner.cancel("job")
        _, outcome, tally = await reports.get()
    assert isinstance(outcome, Failure)
    assert tally.cancelled == 1
    await runner.stop(timeout_s=1)
