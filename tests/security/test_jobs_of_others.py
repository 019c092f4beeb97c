"""Asking for, cancelling, confirming or taking over a job of somebody else: who does not know its client's id cannot.

The worst case: the attacker has learnt the job's id and its server's, and sees the heartbeats.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from attacked_bus import ITS, AttackedBus, Served, becomes, generated, inbox_prefix
from wire import Wire

from envbus.bus.codec import encode
from envbus.bus.messages import (
    Accepted,
    Cancel,
    Check,
    Done,
    Fetch,
    Heard,
    Part,
    PartReply,
    Parts,
    Progress,
    Run,
    Status,
    Wait,
    WireMessage,
    pack,
    parse,
)

BOB_S = secrets.token_hex(16)
"""The id that bob's client has given itself."""


@dataclass(frozen=True)
class Target:
    """Bob's job on a server, and the attacker's connection."""

    job: str
    served: Served
    alice: Wire

    async def ask(self, message: WireMessage, subject: str = "") -> WireMessage:
        """Alice sends this; returns what she is answered."""
        inbox = f"{inbox_prefix('alice')}.x.{secrets.token_hex(4)}"
        subject = subject or ITS.server(self.served.server.server_id)
        return parse((await self.alice.ask(subject, pack(message), inbox=inbox)).data)


@asynccontextmanager
async def bobs_job(bus: AttackedBus, *, upload: Parts | None = None, **item: Any) -> AsyncIterator[Target]:
    """Bob pushes a job; it was accepted, and its result is there unless it is held."""
    job, inbox = secrets.token_hex(16), f"{inbox_prefix('bob')}.x.1"
    body = encode({"model": "m", "input": {"prompt": [], "example_id": 7} | item}) if upload is None else None
    run = Run(job=job, attempt=1, client=BOB_S, call="rollout", size=1, body=body, upload=upload, progress=True)
    async with bus.serving() as served, bus.wire("bob") as bob, bus.wire("alice") as alice:
        bob.subscribe(f"{inbox_prefix('bob')}.>")
        alice.subscribe(f"{inbox_prefix('alice')}.>")
        bob.publish(ITS.rollout, pack(run), reply=inbox)
        await bob.hears(1 if item.get("hold") or upload else 3)
        assert isinstance(parse(bob.heard[0].data), Accepted)
        yield Target(job, served, alice)


async def sees_its_state(bus: AttackedBus, client: str) -> bool:
    async with bobs_job(bus, hold=True) as bobs:
        answer = await bobs.ask(Check(client=client, jobs=[bobs.job]))
        return isinstance(answer, Status) and bobs.job in [*answer.running, *answer.done]


async def fetches_its_result(bus: AttackedBus, client: str) -> bool:
    async with bobs_job(bus, n=300_000) as bobs:
        answer = await bobs.ask(Fetch(client=client, job=bobs.job, index=0))
        return isinstance(answer, PartReply)


async def cancels_it(bus: AttackedBus, client: str) -> bool:
    async with bobs_job(bus, hold=True) as bobs:
        await becomes(lambda: bobs.served.env.started == [7])
        await bobs.ask(Cancel(client=client, jobs=[bobs.job]))
        bobs.served.env.let_go.set()
        ended = bobs.served.env.cancelled
        await becomes(lambda: bool(ended) or bobs.served.counts["done"] == 1)
        return ended == [7]


async def has_its_result_dropped(bus: AttackedBus, client: str) -> bool:
    async with bobs_job(bus, n=300_000) as bobs:
        await bobs.ask(Done(client=client, jobs=[bobs.job]))
        mine = await bobs.ask(Check(client=BOB_S, jobs=[bobs.job]))
        assert isinstance(mine, Status)
        return mine.unknown == [bobs.job]


async def takes_it_over(bus: AttackedBus, client: str) -> bool:
    """Sent again under the same id, from another inbox: what the server says about it goes there."""
    async with bobs_job(bus, hold=True) as bobs:
        again = Run(job=bobs.job, attempt=2, client=client, call="rollout", size=1, body=b"")
        return isinstance(await bobs.ask(again), Accepted)


async def feeds_it(bus: AttackedBus, client: str) -> bool:
    """Its input, which bob is still sending, is made another."""
    parts = Parts(size=600_000, parts=2, part_bytes=300_000, checksum=0, encoding="", raw_size=600_000)
    async with bobs_job(bus, upload=parts) as bobs:
        answer = await bobs.ask(Part(client=client, job=bobs.job, index=0, data=bytes(300_000)))
        return answer.kind == "ok"


async def takes_its_place_in_the_line(bus: AttackedBus, client: str) -> bool:
    """Bob waits for a slot; somebody says in his name that he waits no more."""
    async with bobs_job(bus, hold=True) as bobs, bus.wire("bob") as bob:
        slots = bobs.served.server._desks.reception.slots
        wait = pack(Wait(client=BOB_S, n=5))
        inbox = f"{inbox_prefix('bob')}.line.1"
        bob.subscribe(f"{inbox_prefix('bob')}.line.*")
        slots.capacity = 1  # bob's job has it
        await bob.ask(ITS.wait, wait, inbox=inbox)
        await bobs.ask(Wait(client=client, n=0), ITS.wait)
        return len(slots.line) == 0


async def hears_its_progress(bus: AttackedBus, client: str) -> bool:
    """What the environment reports while it runs is asked for at another inbox."""
    async with bobs_job(bus, hold=True) as bobs:
        await bobs.ask(Heard(client=client, job=bobs.job, attempt=1, seq=0, follow=True))
        bobs.served.env.let_go.set()
        await becomes(lambda: bobs.served.counts["done"] == 1)
        await bobs.ask(Check(client="a1", jobs=[]))  # what the server said before is out
        return any(isinstance(parse(message.data), Progress) for message in bobs.alice.heard)


ATTACKS = [
    hears_its_progress,
    sees_its_state,
    fetches_its_result,
    cancels_it,
    has_its_result_dropped,
    takes_it_over,
    feeds_it,
    takes_its_place_in_the_line,
]
Attack = Callable[[AttackedBus, str], Any]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_a_job_of_somebody_else(mode: str, shared_bus: AttackedBus, attack: Attack) -> None:
    await shared_bus.use(generated(mode))
    for guess in (secrets.token_hex(16), BOB_S[:8]):
        assert not await attack(shared_bus, guess), guess


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
async def test_a_job_of_ones_own(mode: str, shared_bus: AttackedBus, attack: Attack) -> None:
    """The same with the client's id: so nothing else stood in the way."""
    await shared_bus.use(generated(mode))
    assert await attack(shared_bus, BOB_S)


async def test_nobody_but_servers_sees_ids(mode: str, shared_bus: AttackedBus) -> None:
    """Heartbeats say who waits and whose rollouts ended by the first digits of a client's id only."""
    await shared_bus.use(generated(mode))
    async with shared_bus.wire("dash") as dash:
        dash.subscribe("env.*.beat.*")
        await dash.settle()
        async with bobs_job(shared_bus) as bobs:
            said = b""
            while BOB_S[:8].encode() not in said:
                said = b"".join(message.data for message in await dash.hears(len(dash.heard) + 1))
        said = b"".join(message.data for message in await dash.settle())
        assert BOB_S[:9].encode() not in said
        assert bobs.job.encode() not in said
