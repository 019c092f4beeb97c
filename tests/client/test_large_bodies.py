"""What becomes of a call whose large body cannot be moved, whatever the reason (P05, P11)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from envbus.bus.tasks import TaskSet
from envbus.bus.transfer import Packed, pack_body
from envbus.client.client_job import ClientJob
from envbus.client.job_lists import in_messages, jobs_per_message
from envbus.client.large_bodies import LargeBodies
from envbus.client.undelivered import Undelivered
from envbus.errors import EnvbusError, NoServerError, RemoteError
from envbus.job_log import JobLog

WAIT_S = 20


class Owner:
    """Follows one job that the servers named may run."""

    def __init__(self, *servers: str) -> None:
        self.servers = set(servers)
        self.ends: asyncio.Queue[Packed | EnvbusError] = asyncio.Queue()
        self.nobody: list[str] = []
        self.on_end: Callable[[], None] = lambda: None

    def end(self, job_id: str, outcome: Packed | EnvbusError, served_by: str | None) -> None:
        self.on_end()
        self.ends.put_nowait(outcome)

    def nobody_answers(self, server: str) -> None:
        self.nobody.append(server)

    def attempt_failed(self, job_id: str, server: str, reason: str) -> None:
        self.end(job_id, RemoteError(reason), server)

    def is_awaited_from(self, job_id: str, server: str) -> bool:
        return server in self.servers


class Pulls:
    """Transfers whose pulls end as the test says."""

    def __init__(self) -> None:
        self.undelivered = Undelivered(1)
        self.ways: dict[str, asyncio.Future[Packed]] = {}

    async def pull(self, job_id: str, server: str, parts: Any) -> Packed:
        self.ways[server] = asyncio.get_running_loop().create_future()
        return await self.ways[server]

    async def push(self, *arguments: Any) -> None:
        raise MemoryError("no room")


def make(owner: Owner, pulls: Pulls, tasks: TaskSet, *, max_payload: int = 2**20) -> LargeBodies:
    connection = type("Limits", (), {"max_payload": max_payload})()
    log = JobLog(logging.getLogger("envbus.client"))
    return LargeBodies(cast(Any, connection), cast(Any, pulls), owner, tasks, log=log)


def a_job(body: bytes = b"") -> ClientJob:
    return ClientJob(job="job", call="rollout", size=1, body=pack_body(body), ending=lambda outcome: None)


async def test_an_error_without_a_type_of_its_own_ends_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """A result for which there is no memory: nobody would try again, nor tell the caller."""
    tasks, owner, pulls, job = TaskSet("test"), Owner("a"), Pulls(), a_job(b"x" * 5_000)
    large = make(owner, pulls, tasks, max_payload=4_096)
    async with asyncio.timeout(WAIT_S):
        large.collect(job, "a", None)
        await asyncio.sleep(0)
        pulls.ways["a"].set_exception(MemoryError("no room"))
        outcome = await owner.ends.get()
        assert isinstance(outcome, RemoteError)
        assert "MemoryError: no room" in str(outcome)
        large.upload(job, "a")
        assert "no room" in str(await owner.ends.get())
        await tasks.close()
    assert len(caplog.records) == 2


async def test_a_collection_that_is_out_of_date_does_not_disturb_the_next() -> None:
    """Its server stalled, and the job was sent to another one, which delivers."""
    tasks, owner, pulls, job = TaskSet("test"), Owner("a", "b"), Pulls(), a_job()
    large = make(owner, pulls, tasks)
    async with asyncio.timeout(WAIT_S):
        large.collect(job, "a", None)
        job.forget_attempt()
        large.collect(job, "b", None)
        await asyncio.sleep(0)
        owner.servers = {"b"}
        pulls.ways["a"].set_exception(NoServerError("a is gone"))
        while len(tasks) > 1:  # noqa: ASYNC110 - the end of the first task is what is waited for
            await asyncio.sleep(0)
        assert (job.collecting_from, job.failed_collections, owner.nobody) == ("b", 0, [])
        pulls.ways["b"].set_result(pack_body(b"result"))
        assert cast(Packed, await owner.ends.get()).data == b"result"
        await tasks.close()


async def test_a_collector_that_waits_for_room_ends_with_its_job() -> None:
    """Its caller gave up: it must neither hold its place before others, nor fetch what nobody wants."""
    tasks, pulls, job = TaskSet("test"), Pulls(), a_job()
    large = make(Owner("a", "b"), pulls, tasks)
    async with asyncio.timeout(WAIT_S):
        for server in ("a", "b"):
            large.collect(job, server, None)
            job.forget_attempt()
        await asyncio.sleep(0)
        large.over(job.job)
        while len(tasks):  # noqa: ASYNC110 - the ends of the tasks are what is waited for
            await asyncio.sleep(0)
        assert [way.cancelled() for way in pulls.ways.values()] == [True, True]
        assert large._collectors == {}
        large.over(job.job)
        await tasks.close()


async def test_the_collector_that_ends_its_job_is_not_cancelled_for_it() -> None:
    tasks, owner, pulls, job = TaskSet("test"), Owner("a"), Pulls(), a_job()
    large = make(owner, pulls, tasks)
    async with asyncio.timeout(WAIT_S):
        large.collect(job, "a", None)
        ((task,),) = large._collectors.values()
        owner.on_end = lambda: large.over(job.job)
        await asyncio.sleep(0)
        pulls.ways["a"].set_result(pack_body(b"result"))
        assert cast(Packed, await owner.ends.get()).data == b"result"
        await asyncio.wait([task])
        assert not task.cancelled()
        await tasks.close()


async def test_who_waits_behind_one_that_gives_up_is_let_in() -> None:
    undelivered = Undelivered(10)
    await undelivered.reserve("small", 5)
    async with asyncio.timeout(WAIT_S):
        large = asyncio.create_task(undelivered.reserve("large", 8))
        fits = asyncio.create_task(undelivered.reserve("fits", 5))
        await asyncio.sleep(0)
        large.cancel()
        await fits
    assert (len(undelivered), undelivered.size_bytes) == (2, 10)


def test_lists_of_jobs_fit_on_their_messages() -> None:
    jobs = [f"{n:032x}" for n in range(12_000)]
    assert [len(some) for some in in_messages(jobs, 2**20)] == [5_000, 5_000, 2_000]
    assert all(34 * len(some) + 200 < 4_096 for some in in_messages(jobs, 4_096))
    assert [job for some in in_messages(jobs, 4_096) for job in some] == jobs
    assert jobs_per_message(100) == 1
    assert list(in_messages([], 4_096)) == []
