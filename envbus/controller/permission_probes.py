"""Which subjects each role needs, and whether NATS lets this user use them: found out by really doing it.

Subscriptions join no queue group and end at once; what is published is either a question,
or for an id that nobody has.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from envbus.bus.connection import Connection
from envbus.bus.control_messages import StatusRequest
from envbus.bus.messages import Gone, InfoRequest, Run, Wait, pack
from envbus.bus.subjects import (
    Subjects,
    all_beats,
    all_controller_beats,
    all_gone,
    controller,
    controller_beat,
)

Role = Literal["client", "server", "operator", "controller"]
ROLES: tuple[Role, ...] = ("client", "server", "operator", "controller")
BARRIER_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Need:
    """One right that a role needs."""

    role: Role
    action: Literal["publish", "subscribe"]
    subject: str
    data: bytes = b""


def needs(env: str, prefix: str) -> Iterator[Need]:
    """All rights of all roles for one env."""
    subjects, nobody = Subjects(env, prefix), secrets.token_hex(16)
    question = pack(InfoRequest())
    # A fingerprint that no server has: whoever gets the job passes it on, as usual, and gives its slot back.
    job = Run(job=nobody, attempt=1, client=nobody, call="rollout", size=1, fingerprint=nobody, body=b"")
    yield Need("client", "publish", subjects.rollout, pack(job))
    yield Need("client", "publish", subjects.info, question)
    yield Need("client", "publish", subjects.examples, question)
    yield Need("client", "publish", subjects.wait, pack(Wait(client=nobody, n=0)))
    yield Need("client", "publish", subjects.server(nobody), question)
    yield Need("client", "subscribe", all_beats(prefix))
    yield Need("client", "subscribe", subjects.gone)
    for subject in (subjects.rollout, subjects.info, subjects.examples, subjects.wait, subjects.server(nobody)):
        yield Need("server", "subscribe", subject)
    yield Need("server", "subscribe", subjects.ctl(nobody))
    yield Need("server", "subscribe", subjects.ctl_all)
    yield Need("server", "publish", subjects.beat(nobody))
    yield Need("operator", "subscribe", all_beats(prefix))
    yield Need("operator", "subscribe", all_controller_beats(prefix))
    yield Need("operator", "subscribe", all_gone(prefix))
    yield Need("operator", "publish", subjects.ctl(nobody), pack(StatusRequest()))
    yield Need("operator", "publish", subjects.info, question)
    yield Need("operator", "publish", controller(nobody, prefix), pack(StatusRequest()))
    yield Need("controller", "subscribe", all_beats(prefix))
    yield Need("controller", "subscribe", controller(nobody, prefix))
    yield Need("controller", "publish", controller_beat(nobody, prefix))
    yield Need("controller", "publish", subjects.gone, pack(Gone(server=nobody)))
    yield Need("controller", "publish", subjects.ctl(nobody), pack(StatusRequest()))


async def is_allowed(connection: Connection, need: Need) -> bool:
    """Use the right once and see whether NATS objects. On the bus thread.

    Raises:
        TimeoutError: NATS does not answer.
    """
    if need.action == "subscribe":
        subscription = await connection.subscribe(need.subject, lambda message: None)
        try:
            await round_trip(connection)
        finally:
            await connection.leave(subscription)
    else:
        token = connection.inbox.route(lambda message: None)
        try:
            await connection.publish(need.subject, need.data, reply=connection.inbox.reply_subject(token))
            await round_trip(connection)
        finally:
            connection.inbox.unroute(token)
    refusal = connection.denied(need.subject)
    return refusal is None or f" to {need.action} " not in refusal


async def round_trip(connection: Connection, *, timeout_s: float = BARRIER_S) -> float:
    """Return the seconds that a message to oneself takes; what was sent before has then been judged by NATS.

    A user who may not send to its own inbox hears of that instead, in the same order.

    Raises:
        TimeoutError: Neither came.
    """
    heard = asyncio.Event()
    token = connection.inbox.route(lambda message: heard.set())
    subject = connection.inbox.reply_subject(token)
    started = time.monotonic()
    try:
        await connection.publish(subject, b"")
        async with asyncio.timeout(timeout_s):
            while not heard.is_set() and connection.denied(subject) is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(heard.wait(), _POLL_S)
        return time.monotonic() - started
    finally:
        connection.inbox.unroute(token)
