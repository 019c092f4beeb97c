"""Sends of jobs that are over: whichever server takes one up is told to stop."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from envbus.bus.address import resolve_bus_options
from envbus.bus.connection import Connection
from envbus.bus.messages import Accepted, Result, pack
from envbus.client.late import LateReplies
from envbus.job_log import JobLog


async def test_an_outcome_told_twice_does_not_stand_for_the_answer_to_a_send(nats_url: str) -> None:
    """Found by a chaos run: else the copy on the other server runs to its end for nobody (P12)."""
    connection = Connection(resolve_bus_options(nats_url), name="test")
    await connection.open(timeout_s=20)
    stopped: asyncio.Queue[str] = asyncio.Queue()
    log = JobLog(logging.getLogger("envbus.client"))
    late = LateReplies(connection, lambda server, job: stopped.put_nowait(server), keep_s=60, counts=Counter(), log=log)
    try:
        late.expect("job", 1)
        reply = connection.inbox.reply_subject("job")
        await connection.publish(reply, pack(Result(job="job", attempt=1, server="first", encoding="", body=b"")))
        await connection.publish(reply, pack(Accepted(job="job", attempt=2, server="second")))
        async with asyncio.timeout(20):
            assert [await stopped.get(), await stopped.get()] == ["first", "second"]
            await late.answered()
        assert len(late) == 0
    finally:
        late.clear()
        await connection.close()
