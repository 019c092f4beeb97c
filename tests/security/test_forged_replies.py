"""A server is made to speak for the attacker, by the reply field of a request: to subjects that are no inboxes,
and to the inbox of somebody else. So is nats-server itself, by a trace header."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from attacked_bus import ENV, ITS, Access, AttackedBus, Served, becomes, generated, inbox_prefix
from config_surgery import let_answer, move_beside, permit

from envbus.bus import inbox as inbox_module
from envbus.bus.codec import encode
from envbus.bus.connection import Connection
from envbus.bus.messages import Check, Info, InfoRequest, Result, Run, Wait, pack
from envbus.bus.subjects import controller, controller_beat

BODY = encode({"model": "m", "input": {"prompt": [], "example_id": 1}})
SECRET = "c0ffee" * 4
"""The random part of bob's inbox."""


def requests(served: Served) -> list[tuple[str, bytes]]:
    """One for each desk of a server that a trainer may write to."""
    server = ITS.server(served.server.server_id)
    run = pack(Run(job="j1", attempt=1, client="c1", call="rollout", size=1, body=BODY))
    return [
        (ITS.info, pack(InfoRequest())),
        (ITS.examples, b""),
        (ITS.rollout, BODY),
        (ITS.rollout, run),
        (ITS.rollout, b"garbage"),
        (ITS.wait, pack(Wait(client="c1", n=1))),
        (server, pack(Check(client="c1", jobs=["j1"]))),
        (server, run),
        (server, b"garbage"),
    ]


async def answers_come_out(bus: AttackedBus, served: Served, replies: Iterable[str], *, heard_by: Any) -> bool:
    """Whether somebody hears a server's answer to alice's requests on one of the subjects that she named."""
    replies = list(replies)
    async with AsyncExitStack() as stack:
        alice = await stack.enter_async_context(bus.wire("alice"))
        listeners = []
        for user, subjects in heard_by.items():
            listeners.append(listener := await stack.enter_async_context(bus.wire(user)))
            for subject in subjects:
                listener.subscribe(subject)
            await listener.settle()
        inbox = f"{inbox_prefix('alice')}.x.1"
        alice.subscribe(inbox)
        for subject, data in requests(served):
            for reply in replies:
                alice.publish(subject, data, reply=reply)
            assert (await alice.ask(ITS.info, inbox=inbox)).data  # an honest question is answered, after all these
        heard = [message for listener in listeners for message in await listener.settle()]
        return any(message.subject in replies for message in heard)


NO_INBOXES = {
    "op": ["env.*.beat.*", "env.*.gone", "envctl.beat.*"],
    "srv2": ["env.*.ctl.*", "env.*.wait", "env.*.server.*", "$SRV.>"],
    "ctl1": ["envctl.ctl1"],
}
"""Who hears what of the subjects that mean something."""
FORGED = [
    ITS.beat("forged"),
    ITS.gone,
    ITS.ctl_all,
    ITS.ctl("forged"),
    ITS.server("forged"),
    controller("ctl1"),
    controller_beat("ctl1"),
    "$SRV.PING.forged",
]


def all_in_one_account(mode: str, *trainers: str) -> Access:
    """These trainers in that of the servers, which may publish anywhere."""
    access = generated(mode)
    for user in trainers if mode == "accounts" else ():
        access = access.changed(move_beside, access.public_key(user), access.public_key("srv"))
    for server in ("srv", "srv2"):
        access = access.changed(permit, access.public_key(server), "publish", ">")
    return access


async def test_a_reply_field_that_is_no_inbox(mode: str, shared_bus: AttackedBus) -> None:
    await shared_bus.use(generated(mode))
    async with shared_bus.serving() as served:
        assert not await answers_come_out(shared_bus, served, FORGED, heard_by=NO_INBOXES)
        if mode == "roles":  # elsewhere NATS has put a reply subject of its own in its place
            assert served.counts["no_inbox"] > 0


async def test_a_reply_field_that_is_no_inbox_where_nothing_stops_it(
    mode: str, shared_bus: AttackedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shared_bus.use(all_in_one_account(mode, "alice"))
    monkeypatch.setattr(Connection, "is_inbox", lambda self, subject: True)
    async with shared_bus.serving() as served:
        assert await answers_come_out(shared_bus, served, FORGED, heard_by=NO_INBOXES)


async def reaches_bob(bus: AttackedBus, secret: str) -> bool:
    """Whether a server's answers reach bob's inbox for one who thinks that this is its random part."""
    inbox = inbox_prefix("bob")
    guesses = [f"{inbox}.{secret}.1", f"{inbox}.>", f"{inbox}.*.*", f"{inbox}.*.1", inbox]
    async with bus.serving() as served, bus.wire("bob") as bob:
        bob.subscribe(f"{inbox}.{SECRET}.*")
        await bob.settle()
        await answers_come_out(bus, served, guesses, heard_by={})
        return bool(await bob.settle())


async def test_a_reply_field_that_guesses_at_an_inbox(mode: str, shared_bus: AttackedBus) -> None:
    await shared_bus.use(generated(mode))
    assert not await reaches_bob(shared_bus, "0" * 24)
    if mode == "accounts":
        assert not await reaches_bob(shared_bus, SECRET), "not even who knows it gets through"


async def test_a_reply_field_that_names_an_inbox(mode: str, shared_bus: AttackedBus) -> None:
    """So an inbox must be a secret, and where trainers have accounts they must be in one account as well."""
    await shared_bus.use(all_in_one_account(mode, "alice", "bob"))
    assert await reaches_bob(shared_bus, SECRET)


async def test_inboxes_and_ids_are_random(shared_bus: AttackedBus, mode: str) -> None:
    """What a trainer's connection hears on and on which subject each answer, what it calls itself and its jobs."""
    await shared_bus.use(generated(mode))
    seen: set[str] = set()
    async with shared_bus.serving() as served:
        for _ in range(2):
            async with shared_bus.client("bob") as client:
                await client.run_rollout({"prompt": [], "example_id": 1}, None, "m")
                await becomes(lambda: len(served.server._desks.reception.jobs) == 0)  # bob has said that he has it
                assert client._bus is not None
                assert client._session is not None
                inbox = client._bus.connection.inbox
                names = {inbox.subject.rpartition(".")[2], client._session._client_id, *inbox._handlers}
                assert all(len(name) >= 16 and set(name) <= set("0123456789abcdef") for name in names)
                assert not names & seen
                seen |= names


async def answers_for_another(bus: AttackedBus) -> bool:
    """A hostile server, which was sent a request by bob before, answers one that another server has."""
    truth = Info(
        server="s1", state="ready", env=ENV, env_id="truth", fingerprint="f",
        max_concurrent=1, max_input_bytes=1, max_result_bytes=1,
    )  # fmt: skip
    lie = truth.model_copy(update={"env_id": "lie"})
    async with bus.client("bob") as bob, bus.wire("srv") as srv, bus.wire("srv2") as hostile:
        srv.subscribe("env.*.info", queue="workers")
        await srv.settle()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(bob.info())
            (request,) = await srv.hears()
            assert bob._bus is not None
            for number in range(64):
                hostile.publish(bob._bus.connection.inbox.reply_subject(f"{number:x}"), pack(lie))
            await hostile.settle()
            srv.publish(request.reply, pack(truth))
            await srv.settle()
        return asking.result().env_id == "lie"


async def test_an_answer_to_a_request_that_another_server_has(
    mode: str, shared_bus: AttackedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has a reply subject that nobody guesses who was sent another one."""
    await shared_bus.use(generated(mode))
    assert not await answers_for_another(shared_bus)
    await shared_bus.use(all_in_one_account(mode, "bob"))
    assert not await answers_for_another(shared_bus)
    numbers = count()
    monkeypatch.setattr(inbox_module, "secrets", SimpleNamespace(token_hex=lambda size: f"{next(numbers):x}"))
    assert await answers_for_another(shared_bus)


async def speaks_as_it_was_asked_to(bus: AttackedBus, asker: str, subject: str) -> bool:
    """A hostile server is sent requests, by itself or by an accomplice, that say where to reply: not to an inbox.

    Then it publishes there, whatever it likes.
    """
    async with bus.wire("srv2") as hostile, bus.wire(asker) as accomplice, bus.wire("srv") as srv:
        srv.subscribe("env.*.ctl.*")
        srv.subscribe("env.*.rollout", queue="workers")
        hostile.subscribe(subject, queue="workers" if subject == ITS.info else "")
        await srv.settle()
        await hostile.settle()
        for target in (ITS.ctl_all, ITS.rollout):
            accomplice.publish(subject, b"", reply=target)
            await accomplice.settle()
            await hostile.settle()
            hostile.publish(target, b"whatever it likes")
        await hostile.settle()
        return any(message.data for message in await srv.settle())


@pytest.mark.parametrize(("asker", "subject"), [("srv2", f"{inbox_prefix('srv2')}.x"), ("alice", ITS.info)])
async def test_a_server_that_was_asked_to_speak(mode: str, shared_bus: AttackedBus, asker: str, subject: str) -> None:
    """NATS's own rule for answers, allow_responses, would let it: so it is not used."""
    access = generated(mode)
    await shared_bus.use(access)
    assert not await speaks_as_it_was_asked_to(shared_bus, asker, subject)
    access = access.changed(let_answer, access.public_key("srv2"))
    if mode == "accounts" and asker == "alice":
        access = access.changed(move_beside, access.public_key("alice"), access.public_key("srv"))
    await shared_bus.use(access)
    assert await speaks_as_it_was_asked_to(shared_bus, asker, subject)


async def forged_result_counts(bus: AttackedBus, *, knows_job: bool) -> bool:
    """A hostile server has found out the reply subject of a job that it does not have, and sends a result there."""
    async with bus.serving() as served, bus.client("bob") as bob, bus.wire("srv2") as hostile:
        item: Any = {"prompt": [], "example_id": 1, "hold": True}
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(bob.run_rollout(item, None, "m"))
            await becomes(lambda: bool(served.env.started))
            (job,) = served.server._desks.reception.jobs.unfinished()
            forged = Result(
                job=job.job if knows_job else "0" * 32,
                attempt=1,
                server=served.server.server_id,
                body=encode({"output": {"example_id": 1, "reward": 0.0}}),
            )
            hostile.publish(job.reply, pack(forged))
            await hostile.settle()
            assert hostile.errors == []
            await bob.info()  # what came to bob's connection before has been looked at
            served.env.let_go.set()
        return call.result()["reward"] == 0.0


@pytest.mark.parametrize("knows_job", [False, True])
async def test_a_result_of_a_server_that_does_not_have_the_job(
    mode: str, shared_bus: AttackedBus, knows_job: bool
) -> None:
    """It must name the job, and a job's id is 128 random bits that only its server has."""
    await shared_bus.use(generated(mode))
    assert await forged_result_counts(shared_bus, knows_job=knows_job) is knows_job


async def traces_reach_bob(bus: AttackedBus) -> bool:
    async with bus.wire("alice") as alice, bus.wire("bob") as bob:
        inbox = f"{inbox_prefix('bob')}.x.1"
        bob.subscribe(inbox)
        await bob.settle()
        own = f"{inbox_prefix('alice')}.x.1"
        alice.subscribe(own)
        for destination in (inbox, own):
            alice.publish(ITS.info, b"", headers=f"Nats-Trace-Dest: {destination}")
        await alice.hears()  # traces are sent later, but in order
        return bool(await bob.settle())


async def test_a_trace_header(mode: str, shared_bus: AttackedBus) -> None:
    """nats-server publishes what became of a message to the subject that this header names."""
    await shared_bus.use(generated(mode))
    assert not await traces_reach_bob(shared_bus)


async def test_a_trace_header_where_nothing_stops_it(mode: str, shared_bus: AttackedBus) -> None:
    access = generated(mode)
    alice, bob = access.public_key("alice"), access.public_key("bob")
    if mode == "accounts":
        access = access.changed(move_beside, alice, bob)
    else:
        access = access.changed(permit, alice, "publish", f"{inbox_prefix('bob')}.x.1")
    await shared_bus.use(access)
    assert await traces_reach_bob(shared_bus)
