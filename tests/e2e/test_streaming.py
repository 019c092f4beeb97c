"""Progress of running rollouts: in order, once per attempt, before the call returns, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import nats
import pytest
from stage import ENV_ID, READY_S, Stage, becomes, do, run, settled
from stage_env import load_environment

from envbus import NATSEnvClient, NATSEnvServer, RolloutProgress
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Accepted, Ok, Progress, Result, Run, pack, parse
from envbus.bus.subjects import Subjects
from envbus.client.following import Following

WINDOW_BYTES = 100_000


@pytest.fixture(scope="module")
def shared(session_nats: EmbeddedNats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One server with a small window, for all tests that leave it as it was."""
    common = Stage(session_nats.url, tmp_path_factory.mktemp("stage"))
    common.launch(settings={"progress_window_bytes": WINDOW_BYTES})
    yield common
    common.close()


@pytest.fixture
def own_stage(own_nats: EmbeddedNats, tmp_path: Path) -> Iterator[Stage]:
    """A stage on a nats-server that the test may kill."""
    own = Stage(own_nats.url, tmp_path)
    yield own
    own.close()


class Ear:
    """An on_progress that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[RolloutProgress] = []

    def __call__(self, progress: RolloutProgress) -> None:
        self.heard.append(progress)

    def numbers(self, attempt: int = 1) -> list[int]:
        return [progress.number for progress in self.heard if progress.attempt == attempt]

    def said(self, attempt: int = 1) -> list[int]:
        """What the environment counted, from 0."""
        return [progress.data["n"] for progress in self.heard if progress.attempt == attempt]

    def is_whole(self, count: int, *, attempt: int = 1) -> bool:
        return self.numbers(attempt) == list(range(1, count + 1)) and self.said(attempt) == list(range(count))


@asynccontextmanager
async def served_here(stage: Stage) -> AsyncIterator[NATSEnvServer]:
    """Serve the stage environment in this process and loop: it takes jobs at once."""
    environment = load_environment(str(stage.ledger_file))
    options: dict[str, Any] = {"name": stage.name, "prefix": stage.prefix, "environment": environment}
    server = NATSEnvServer(ENV_ID, address=stage.url, handle_signals=False, **options)
    serving = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        await server.close()
        await serving


async def watch(client: NATSEnvClient, item: Any, on_progress: Callable[[RolloutProgress], None]) -> Any:
    return await client.run_rollout(item, None, "m", on_progress=on_progress)


@pytest.mark.parametrize(
    ("count", "size"),
    [
        pytest.param(0, 0, id="none"),
        pytest.param(500, 10, id="many small"),
        pytest.param(8, 1_200_000, id="over a message and the window"),
    ],
)
async def test_all_progress_comes_in_order_before_the_call_returns(shared: Stage, count: int, size: int) -> None:
    ear = Ear()
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        output = await watch(client, do("report", n=count, size=size), ear)
        assert output["wanted"]
        assert ear.is_whole(count)
        assert all(len(progress.data["blob"]) == size for progress in ear.heard)
        await settled(client)
    await shared.idle()


async def test_callbacks_run_on_the_callers_loop_and_what_they_raise_changes_nothing(
    shared: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    places: list[Any] = []

    def broken(progress: RolloutProgress) -> None:
        places.append((threading.get_ident(), asyncio.get_running_loop()))
        raise ValueError(f"broken at {progress.number}")

    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        assert (await watch(client, do("report", n=3), broken))["reward"] == 1.0
    assert places == [(threading.get_ident(), asyncio.get_running_loop())] * 3
    assert "broken at 3" in caplog.text


async def test_who_does_not_ask_gets_none_and_the_environment_knows(shared: Stage) -> None:
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        output = await run(client, do("report", n=50, size=100_000))
        assert output["wanted"] is False


async def test_many_calls_at_once_are_told_apart(shared: Stage) -> None:
    ears = [Ear() for _ in range(20)]
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        await asyncio.gather(*(watch(client, do("report", n=n), ear) for n, ear in enumerate(ears)))
        await settled(client)
    assert all(ear.is_whole(n) for n, ear in enumerate(ears))


async def test_a_group_reports_for_all_its_members(shared: Stage) -> None:
    ear = Ear()
    items = [do("report", n=5, every_s=0.01) for _ in range(3)]
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        await client.run_group(items, None, "m", on_progress=ear)
    assert ear.numbers() == list(range(1, 16))
    assert sorted(ear.said()) == sorted(3 * list(range(5)))


async def test_a_large_input_and_a_large_result_stream_as_well(shared: Stage) -> None:
    """They go in parts, and the announced result waits for the progress as well."""
    ear = Ear()
    item = do("report", n=30, size=50_000) | {"prompt": [{"role": "user", "content": "x" * 2_000_000}]}
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        await client.run_group([item, do("big", n=3_000_000)], None, "m", on_progress=ear)
        await settled(client)
    assert ear.is_whole(30)
    await shared.idle()


async def test_a_blocked_caller_holds_its_environment_back_and_loses_nothing(shared: Stage) -> None:
    """What is under way is one window, however long that lasts."""
    item = do("report", n=60, size=10_000, log=True)
    ear = Ear()

    def reported() -> int:
        return len(shared.events("reported", example_id=item["example_id"]))

    def block(progress: RolloutProgress) -> None:
        ear(progress)
        give_up_at = time.monotonic() + 20
        while progress.number == 1 and reported() < 9 and time.monotonic() < give_up_at:
            time.sleep(0.01)
        if progress.number == 1:
            time.sleep(0.5)
            counts.append(reported())

    counts: list[int] = []
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        await watch(client, item, block)
        await settled(client)
    assert 9 <= counts[0] <= 11
    assert ear.is_whole(60)
    await shared.idle()


async def test_what_is_lost_on_the_way_is_asked_for_again(shared: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, one in between and the last: the call returns only when they are there."""
    lost = {1, 7, 8, 20}
    came = Following.came

    def lose(self: Following, job_id: str, message: Progress) -> None:
        if message.seq in lost:
            lost.remove(message.seq)
        else:
            came(self, job_id, message)

    monkeypatch.setattr(Following, "came", lose)
    ear = Ear()
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        await watch(client, do("report", n=20, every_s=0.02), ear)
        await settled(client)
    assert not lost
    assert ear.is_whole(20)


@pytest.mark.parametrize("action", [{}, {"prompt": [{"role": "user", "content": "x" * 1_000}]}])
async def test_a_job_that_is_done_still_sends_its_progress_again(
    shared: Stage, monkeypatch: pytest.MonkeyPatch, action: dict[str, Any]
) -> None:
    """All of it is lost until the outcome is here; the server holds both until they are confirmed."""
    came = Following.came

    def lose(self: Following, job_id: str, message: Progress) -> None:
        if self._jobs[job_id].held is not None:
            came(self, job_id, message)

    monkeypatch.setattr(Following, "came", lose)
    ear = Ear()
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        output = await asyncio.wait_for(watch(client, do("report", n=20, size=4_000) | action, ear), 20)
        assert output["reward"] == 1.0
        await settled(client)
    assert ear.is_whole(20)
    await shared.idle()


async def test_a_failure_comes_after_the_progress_before_it(shared: Stage) -> None:
    ear = Ear()
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        items = [do("report", n=10), do("raise", kind="own")]
        outputs = await client.run_group(items, None, "m", on_progress=ear)
    assert [output["error"]["error"] for output in outputs] == ["StageBrokenError"] * 2
    assert ear.is_whole(10)


async def test_a_restart_of_nats_in_mid_stream_loses_none(own_stage: Stage, own_nats: EmbeddedNats) -> None:
    """The environment reports on meanwhile; the same attempt goes on."""
    own_stage.launch()
    item, ear = do("report", n=150, every_s=0.01, log=True), Ear()
    async with own_stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(watch(client, item, ear))
        await becomes(lambda: len(ear.heard) >= 20)
        await own_nats.kill()
        await own_stage.event("reported", item["example_id"], count=60)
        await own_nats.restart()
        await asyncio.wait_for(call, 20)
        await settled(client)
    assert ear.is_whole(150)
    assert len(own_stage.events("start", example_id=item["example_id"])) == 1


async def test_a_lost_server_means_a_higher_attempt_from_1(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a rollout that runs, and for one whose result is here, but not all the progress that went before it."""
    came = Following.came
    held: list[str] = []

    def lose(self: Following, job_id: str, message: Progress) -> None:
        if message.attempt == 1 and message.seq == 3 and self._jobs[job_id].size == 2:
            held[:] = [job_id] if self._jobs[job_id].held is not None else []
        else:
            came(self, job_id, message)

    monkeypatch.setattr(Following, "came", lose)
    dying = stage.launch()
    await stage.ready()
    running, done = Ear(), Ear()
    async with stage.client() as client:
        pair = [do("report", n=5), do("slow")]
        calls = [
            asyncio.create_task(watch(client, do("report", n=7, t=60), running)),
            asyncio.create_task(client.run_group(pair, None, "m", on_progress=done)),
        ]
        await becomes(lambda: len(running.heard) == 7 and bool(held), what="one runs on, one lacks progress")
        assert not calls[1].done()
        async with served_here(stage):
            dying.kill()
            alone, (first, _) = await asyncio.wait_for(asyncio.gather(*calls), 20)
            assert alone["pid"] == first["pid"] == os.getpid()
        await settled(client)
    assert [(heard.attempt, heard.number) for heard in running.heard] == [(a, n) for a in (1, 2) for n in range(1, 8)]
    assert done.numbers(1) == [1, 2]
    assert done.is_whole(5, attempt=2)


async def test_a_cancelled_call_hears_nothing_more(shared: Stage) -> None:
    item, ear = do("report", n=100_000, every_s=0.001, cleanup_s=0.2), Ear()
    async with shared.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(watch(client, item, ear))
        await becomes(lambda: len(ear.heard) >= 10)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        count = len(ear.heard)
        await shared.event("cancelled", item["example_id"])
        assert len(ear.heard) == count
        await settled(client)
    await shared.idle()


async def test_an_environment_that_waits_for_a_caller_that_is_gone_is_cancelled(shared: Stage) -> None:
    """Its report waits for room that nobody gives; the orphan grace (1 s here) ends it."""
    subjects = Subjects("stage", shared.prefix)
    await shared.ready()
    connection = await nats.connect(shared.url)
    try:
        body = msgpack.packb({"model": "m", "input": do("report", n=100, size=WINDOW_BYTES // 2, example_id="gone")})
        job = Run(job="j", attempt=1, client="c", call="rollout", size=1, body=body, progress=True)
        inbox = connection.new_inbox()
        answers = await connection.subscribe(inbox)
        await connection.publish(subjects.rollout, pack(job), reply=inbox)
        kinds = [parse((await answers.next_msg(timeout=20)).data).kind for _ in range(2)]
        assert kinds == ["accepted", "progress"]
    finally:
        await connection.close()
    await shared.event("cancelled", "gone")
    await shared.idle()


async def test_a_server_that_knows_no_progress_gives_its_result(nats_url: str, stage: Stage) -> None:
    """An older one: it ignores what it is asked and names no total."""
    subjects = Subjects("stage", stage.prefix)
    connection = await nats.connect(nats_url)

    async def answer(message: Any) -> None:
        request = parse(message.data)
        if isinstance(request, Run):
            same = {"job": request.job, "attempt": 1, "server": "old"}
            await message.respond(pack(Accepted(**same)))
            await message.respond(pack(Result(**same, body=msgpack.packb({"output": {"reward": 1.0}}))))
        else:
            await message.respond(pack(Ok(server="old")))

    try:
        await connection.subscribe(subjects.rollout, queue="workers", cb=answer)
        await connection.subscribe(subjects.server("old"), cb=answer)
        await connection.flush()
        ear = Ear()
        async with stage.client() as client:
            output = await asyncio.wait_for(watch(client, do("report", n=3), ear), 10)
        assert output == {"reward": 1.0}
        assert ear.heard == []
    finally:
        await connection.close()


async def test_a_drain_lets_a_stream_end(stage: Stage) -> None:
    """Of a server in the caller's own process and loop, at that."""
    ear = Ear()
    async with served_here(stage) as server, stage.client() as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(watch(client, do("report", n=200, size=20_000, every_s=0.001), ear))
        await becomes(lambda: len(ear.heard) >= 3)
        closing = asyncio.create_task(server.close())
        await asyncio.wait_for(call, 20)
        await closing
    assert ear.is_whole(200)
