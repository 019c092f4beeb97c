"""A client of the job protocol by hand, on a NATS connection of its own: it does what a test says, and nothing else."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
from stage import Stage, becomes

from envbus.bus.codec import decode_map, encode
from envbus.bus.inbox import is_no_responders
from envbus.bus.messages import (
    Accepted,
    Announce,
    Busy,
    Cancel,
    Done,
    Fetch,
    PartReply,
    Parts,
    Result,
    Run,
    WireMessage,
    pack,
    parse,
)
from envbus.bus.subjects import Subjects
from envbus.bus.transfer import Assembly

ROOM = 2**30


class RawClient:
    """Pushes jobs, keeps what is answered, and says done only when told to."""

    def __init__(self, connection: Any, subjects: Subjects) -> None:
        self.connection = connection
        self.subjects = subjects
        self.client_id = secrets.token_hex(16)
        self.inbox = connection.new_inbox()
        self.answers: defaultdict[str, list[WireMessage]] = defaultdict(list)
        self.refused: Counter[str] = Counter()
        """Answers by job that were busy, or NATS's 503."""

    @classmethod
    @asynccontextmanager
    async def connect(cls, stage: Stage) -> AsyncIterator[RawClient]:
        connection = await nats.connect(stage.url)
        try:
            client = cls(connection, Subjects(stage.name or "", stage.prefix))
            await connection.subscribe(f"{client.inbox}.*", cb=client._on_reply)
            yield client
        finally:
            await connection.close()

    async def _on_reply(self, message: Any) -> None:
        job = message.subject.rpartition(".")[2]
        if is_no_responders(message):
            self.refused[job] += 1
        elif message.data:
            answer = parse(message.data)
            self.refused[job] += isinstance(answer, Busy)
            self.answers[job].append(answer)

    def message(self, job: str, item: Any, *, upload: Parts | None = None) -> bytes:
        body = None if upload else encode({"model": "m", "input": item})
        return pack(Run(job=job, attempt=1, client=self.client_id, call="rollout", size=1, body=body, upload=upload))

    async def push(self, item: Any, *, upload: Parts | None = None) -> str:
        """Push one job; returns its id without waiting for an answer."""
        job = secrets.token_hex(16)
        data = self.message(job, item, upload=upload)
        await self.connection.publish(self.subjects.rollout, data, reply=f"{self.inbox}.{job}")
        return job

    async def take(self, item: Any, *, upload: Parts | None = None) -> str | None:
        """Push one job; None if it is refused."""
        job = await self.push(item, upload=upload)
        await becomes(lambda: bool(self.refused[job] or self.answers[job]), what="an answer to a push")
        return job if any(isinstance(answer, Accepted) for answer in self.answers[job]) else None

    async def run(self, item: Any) -> str:
        """Push one job again and again until it is taken, and wait for its outcome."""
        while (job := await self.take(item)) is None:  # noqa: ASYNC110 - only another process changes it
            await asyncio.sleep(0.02)
        await self.ended(job)
        return job

    async def ended(self, job: str) -> WireMessage:
        def outcome() -> list[WireMessage]:
            return [answer for answer in self.answers[job] if not isinstance(answer, Accepted | Busy)]

        await becomes(lambda: bool(outcome()), what=f"the outcome of {job}")
        return outcome()[0]

    def server_of(self, job: str) -> str:
        return next(answer.server for answer in self.answers[job] if isinstance(answer, Accepted))

    async def ask(self, server: str, request: WireMessage) -> WireMessage:
        answer = await self.connection.request(self.subjects.server(server), pack(request), timeout=10)
        return parse(answer.data)

    async def output(self, job: str) -> dict[str, Any]:
        """The result of a job: as it came, or fetched part by part."""
        outcome = await self.ended(job)
        if isinstance(outcome, Result):
            return dict(decode_map(outcome.body)["output"])
        assert isinstance(outcome, Announce), outcome
        assembly = Assembly(outcome.parts, max_bytes=ROOM)
        for index in range(outcome.parts.parts):
            part = await self.ask(outcome.server, Fetch(client=self.client_id, job=job, index=index))
            assert isinstance(part, PartReply), part
            assembly.put(index, part.data)
        return dict(decode_map(assembly.body())["output"])

    async def done(self, job: str) -> None:
        await self.ask(self.server_of(job), Done(client=self.client_id, jobs=[job]))

    async def cancel(self, job: str) -> None:
        await self.ask(self.server_of(job), Cancel(client=self.client_id, jobs=[job]))
