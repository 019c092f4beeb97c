"""The last resorts of a server on the bus: what goes wrong in itself ends neither its jobs' calls nor its beats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from envbus.bus.address import resolve_bus_options
from envbus.bus.codec import encode
from envbus.bus.connection import Connection
from envbus.bus.messages import Accepted, Failure, Fetch, Grant, Run, Wait, WireMessage, pack, parse
from envbus.bus.subjects import Subjects
from envbus.bus.transfer import pack_body
from envbus.errors import ResultLostError
from envbus.server.beats import Beats
from envbus.server.identity import new_identity
from envbus.server.reception import Reception
from envbus.server.runner import Tally, Work
from envbus.settings import ServerSettings

WAIT_S = 20
BROKEN: Any = object()
"""What neither a tally nor an outcome should ever hold."""


class Started:
    """A runner that only notes what it is given."""

    def __init__(self) -> None:
        self.jobs: asyncio.Queue[str] = asyncio.Queue()

    def start(self, work: Work) -> None:
        self.jobs.put_nowait(work.job)

    def cancel(self, job: str) -> None:
        pass

    def heard(self, job: str, attempt: int, freed_bytes: int) -> None:
        pass


@asynccontextmanager
async def receiving(url: str, prefix: str, runner: Started) -> AsyncIterator[tuple[Reception, Connection, Subjects]]:
    connection = Connection(resolve_bus_options(url), name="test")
    await connection.open(timeout_s=WAIT_S)
    subjects = Subjects("env", prefix)
    reception = Reception(
        connection,
        subjects,
        server_id="server",
        settings=ServerSettings(),
        capacity=1,
        fingerprint="",
        runner=runner,
    )
    await reception.open()
    await reception.ready()
    try:
        yield reception, connection, subjects
    finally:
        await reception.close()
        await connection.close()


@pytest.mark.parametrize(
    ("outcome", "tally"),
    [(pack_body(encode({"output": {}})), Tally(ended=[BROKEN])), (BROKEN, Tally(done=1))],
    ids=["tally", "outcome"],
)
@pytest.mark.parametrize("is_plain", [False, True], ids=["job", "plain"])
async def test_an_outcome_that_cannot_be_told_is_a_failure_and_frees_its_slot(
    nats_url: str, prefix: str, outcome: Any, tally: Tally, is_plain: bool
) -> None:
    """P04."""
    runner, answers = Started(), asyncio.Queue[bytes]()
    async with asyncio.timeout(WAIT_S), receiving(nats_url, prefix, runner) as (reception, connection, subjects):
        token = connection.inbox.route(lambda message: answers.put_nowait(message.data))
        run = Run(job="job", attempt=1, client="client", call="rollout", size=1, body=b"", start_by=time.time() + 60)
        request = encode({"input": {}}) if is_plain else pack(run)
        await connection.publish(subjects.rollout, request, reply=connection.inbox.reply_subject(token))
        job = await runner.jobs.get()
        if not is_plain:
            assert isinstance(parse(await answers.get()), Accepted)
        reception.finished(job, outcome, tally)
        told = await answers.get()
        assert b"AttributeError" in told
        if not is_plain:
            assert isinstance(parse(told), Failure)
            failure = await ask(connection, subjects, Fetch(client="client", job=job, index=0))
            assert isinstance(failure, Failure)
            assert failure.code == ResultLostError.code
        assert (reception.slots.in_flight, len(reception.jobs.unfinished())) == (0, 0)
        connection.inbox.unroute(token)


async def ask(connection: Connection, subjects: Subjects, message: WireMessage) -> WireMessage:
    return parse(await connection.request(subjects.server("server"), pack(message), timeout_s=WAIT_S))


@pytest.mark.parametrize("is_pushed", [True, False], ids=["pushed", "granted"])
async def test_a_job_that_cannot_be_begun_is_answered_and_leaves_nothing(
    nats_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, is_pushed: bool
) -> None:
    """P04: its slot is free, what the slots say is done, and the same job may come again."""
    runner, answers = Started(), asyncio.Queue[bytes]()
    async with asyncio.timeout(WAIT_S), receiving(nats_url, prefix, runner) as (reception, connection, subjects):
        token = connection.inbox.route(lambda message: answers.put_nowait(message.data))
        inbox = connection.inbox.reply_subject(token)
        run = Run(job="job", attempt=1, client="client", call="rollout", size=1, body=b"", start_by=time.time() + 60)
        subject = subjects.rollout
        if not is_pushed:
            await connection.publish(subjects.wait, pack(Wait(client="client", n=1, priority=0)), reply=inbox)
            while not isinstance(granted := parse(await answers.get()), Grant):
                pass
            run, subject = run.model_copy(update={"grant": granted.grant}), subjects.server("server")
        with monkeypatch.context() as broken:
            broken.setattr(runner, "start", BROKEN)
            await connection.publish(subject, pack(run), reply=inbox)
            assert isinstance(parse(await answers.get()), Accepted)
            assert b"TypeError" in await answers.get()
        assert (reception.slots.in_flight, len(reception.jobs), reception.slots.free) == (0, 0, 0)
        while runner.jobs.empty():  # until the credit is open again
            await connection.publish(subjects.rollout, pack(run), reply=inbox)
            await answers.get()
        connection.inbox.unroute(token)


async def test_credits_that_cannot_be_withdrawn_come_back(
    nats_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P04: who waits gets the slot all the same."""
    answers = asyncio.Queue[bytes]()
    async with asyncio.timeout(WAIT_S), receiving(nats_url, prefix, Started()) as (reception, connection, subjects):
        monkeypatch.setattr(reception._credits, "withdraw", BROKEN)
        token = connection.inbox.route(lambda message: answers.put_nowait(message.data))
        inbox = connection.inbox.reply_subject(token)
        await connection.publish(subjects.wait, pack(Wait(client="client", n=1, priority=0)), reply=inbox)
        while not isinstance(parse(await answers.get()), Grant):
            pass
        connection.inbox.unroute(token)
    assert "the queue group was not left in order" in caplog.text


async def test_a_heartbeat_that_cannot_be_made_does_not_end_the_others(
    nats_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P08: silence would pass for death."""
    lags, beats = iter([0.0]), asyncio.Queue[bytes]()

    def lag() -> float:
        if next(lags, None) is None:
            raise ValueError("no lag")
        return 0.0

    async with asyncio.timeout(WAIT_S), receiving(nats_url, prefix, Started()) as (reception, connection, subjects):
        identity = new_identity("env", None, None, "server")
        subscription = await connection.subscribe(
            subjects.beat("server"), lambda message: beats.put_nowait(message.data)
        )
        beating = Beats(connection, subjects, reception, identity=identity, lag=lag, interval_s=0.01)
        task = asyncio.create_task(beating.run())
        await beats.get()
        while not caplog.records:  # noqa: ASYNC110 - no event tells of a line in the log
            await asyncio.sleep(0.01)
        lags = iter([0.0])
        await beats.get()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.leave(subscription)
    assert "a heartbeat was not sent: no lag" in caplog.text
