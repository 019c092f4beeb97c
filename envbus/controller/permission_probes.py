"""Which subjects each role needs, and whether NATS lets this user use them: found out by really doing it.

Subscriptions end at once, with nothing in between: of a queue group, too, which a user may
be limited to. What is published is either a question, or for an id that nobody has.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from envbus.bus.connection import Connection
from envbus.bus.control_messages import StatusRequest
from envbus.bus.messages import Gone, InfoRequest, Run, Wait, pack
from envbus.bus.subjects import (
    WORK_QUEUE,
    Subjects,
    all_beats,
    all_controller_beats,
    all_discovery,
    all_gone,
    controller,
    controller_beat,
)

Role = Literal["trainer", "server", "operator", "controller", "dashboard"]
ROLES: tuple[Role, ...] = ("trainer", "server", "operator", "controller", "dashboard")
BARRIER_S = 5.0


@dataclass(frozen=True, slots=True)
class Need:
    """One right that a role needs.

    Attributes:
        queue: The queue group to subscribe in; the right may be limited to it.
        without: What is missed without the right, if the role works all the same.
    """

    role: Role
    action: Literal["publish", "subscribe"]
    subject: str
    data: bytes = b""
    queue: str = ""
    without: str = ""


def needs(env: str, prefix: str, *, controller_id: str | None = None) -> Iterator[Need]:
    """All rights of all roles for one env.

    Args:
        controller_id: Of the controller that this user may be limited to; default: one that nobody has.
    """
    subjects, nobody = Subjects(env, prefix), secrets.token_hex(16)
    yield from _trainer(subjects, nobody)
    yield from _server(subjects, nobody)
    yield from _operator(subjects, nobody)
    yield from _controller(subjects, nobody, controller_id or nobody)
    yield Need("dashboard", "subscribe", all_beats(prefix))
    yield Need("dashboard", "subscribe", all_controller_beats(prefix), without="controllers are not shown")
    yield Need("dashboard", "subscribe", all_gone(prefix), without="ends are shown later")


def _trainer(subjects: Subjects, nobody: str) -> Iterator[Need]:
    question = pack(InfoRequest())
    # A fingerprint that no server has: whoever gets the job passes it on, as usual, and gives its slot back.
    job = Run(job=nobody, attempt=1, client=nobody, call="rollout", size=1, fingerprint=nobody, body=b"")
    yield Need("trainer", "publish", subjects.rollout, pack(job))
    yield Need("trainer", "publish", subjects.info, question)
    yield Need("trainer", "publish", subjects.examples, question)
    yield Need("trainer", "publish", subjects.wait, pack(Wait(client=nobody, n=0)))
    yield Need("trainer", "publish", subjects.server(nobody), question)
    yield Need("trainer", "subscribe", all_beats(subjects.prefix), without="servers() fails, errors say less")
    yield Need("trainer", "subscribe", subjects.gone, without="the end of a server is noticed a little later")


def _server(subjects: Subjects, nobody: str) -> Iterator[Need]:
    for subject in (subjects.rollout, subjects.info, subjects.examples):
        yield Need("server", "subscribe", subject, queue=WORK_QUEUE)
    for subject in (subjects.wait, subjects.server(nobody), subjects.ctl(nobody), subjects.ctl_all):
        yield Need("server", "subscribe", subject)
    yield Need("server", "publish", subjects.beat(nobody))
    yield Need("server", "subscribe", all_discovery(), without="'nats micro' does not see it")


def _operator(subjects: Subjects, nobody: str) -> Iterator[Need]:
    prefix, question = subjects.prefix, pack(StatusRequest())
    yield Need("operator", "subscribe", all_beats(prefix))
    yield Need("operator", "subscribe", all_controller_beats(prefix))
    yield Need("operator", "subscribe", all_gone(prefix), without="ends are shown later")
    yield Need("operator", "publish", subjects.ctl(nobody), question)
    yield Need("operator", "publish", subjects.info, pack(InfoRequest()))
    yield Need("operator", "publish", controller(nobody, prefix), question)


def _controller(subjects: Subjects, nobody: str, controller_id: str) -> Iterator[Need]:
    own, own_beat = controller(controller_id, subjects.prefix), controller_beat(controller_id, subjects.prefix)
    yield Need("controller", "subscribe", subjects.beats)
    yield Need("controller", "subscribe", own)
    yield Need("controller", "subscribe", own_beat)
    yield Need("controller", "publish", own_beat)
    yield Need("controller", "publish", own, without="a second one of its name is not noticed at the start")
    yield Need("controller", "publish", subjects.gone, pack(Gone(server=nobody)))
    yield Need("controller", "publish", subjects.ctl(nobody), pack(StatusRequest()))


async def is_allowed(connection: Connection, need: Need) -> bool:
    """Use the right once and see whether NATS objects. On the bus thread.

    Raises:
        TimeoutError: NATS does not answer.
    """
    if need.action == "subscribe":
        await connection.leave(await connection.subscribe(need.subject, lambda message: None, queue=need.queue))
        await connection.round_trip(timeout_s=BARRIER_S)
    else:
        token = connection.inbox.route(lambda message: None)
        try:
            await connection.publish(need.subject, need.data, reply=connection.inbox.reply_subject(token))
            await connection.round_trip(timeout_s=BARRIER_S)
        finally:
            connection.inbox.unroute(token)
    return connection.denied(need.action, need.subject) is None
