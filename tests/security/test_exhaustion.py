"""Taking from the others what they need: messages and lines without measure, subscriptions, connections, a reader
that does not read, floods. The others go on, and what the attacker takes has a bound."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from attacked_bus import ITS, AttackedBus, becomes, generated, inbox_prefix
from config_surgery import limit
from wire import RefusedError, Wire

from envbus import NATSEnvClient
from envbus.bus.codec import encode
from envbus.bus.messages import Fetch, Run, pack
from envbus.server.allowance import Allowance
from envbus.server.line import Line, Waiter

MIB = 2**20
FLOOD = 5_000
INBOX = f"{inbox_prefix('alice')}.x"
LIMITS = {"max_pending_bytes": 8 * MIB, "trainer_connections": 5, "max_connections": 30}


async def work(bus: AttackedBus, jobs: int = 5) -> None:
    """Bob works: all of his jobs end well."""
    async with bus.client("bob") as client:
        await all_done(client, jobs)


async def all_done(client: NATSEnvClient, jobs: int) -> None:
    items: list[Any] = [{"prompt": [], "example_id": number} for number in range(jobs)]
    async with asyncio.timeout(60):
        outputs = await asyncio.gather(*(client.run_rollout(item, None, "m") for item in items))
    assert [output["reward"] for output in outputs] == [1.0] * jobs


# ---- what NATS bounds


async def giant_message_arrives(bus: AttackedBus) -> bool:
    async with bus.wire("alice") as alice, bus.wire("srv") as srv:
        srv.subscribe("env.*.server.*")
        await srv.settle()
        with contextlib.suppress(RefusedError):
            alice.publish(ITS.server("s1"), bytes(4 * MIB), reply=f"{INBOX}.1")
            await alice.settle()
        return bool(await srv.settle())


async def endless_line_is_read(bus: AttackedBus) -> bool:
    async with bus.wire("alice") as alice:
        try:
            await alice.push(b"PUB " + b"x" * 2**16)
            alice.write(b" 0\r\n\r\n")
            await alice.settle()
        except RefusedError:
            return False
        return True


async def subscriptions_have_no_end(bus: AttackedBus) -> bool:
    async with bus.wire("alice") as alice:
        for number in range(6000):
            alice.subscribe(f"{INBOX}.{number}")
        alice.publish(f"{INBOX}.{number}", b"")
        with contextlib.suppress(RefusedError):
            await alice.settle()
        return bool(alice.heard)


async def pending_data_has_no_end(bus: AttackedBus) -> bool:
    """Alice asks for parts of a large result again and again, and reads none of them."""
    job = secrets.token_hex(16)
    call = encode({"model": "m", "input": {"prompt": [], "example_id": 1, "n": 512 * 1024}})
    run = Run(job=job, attempt=1, client="a1", call="rollout", size=1, body=call)
    fetch = pack(Fetch(client="a1", job=job, index=0))
    async with bus.serving() as served, bus.wire("alice") as alice:
        alice.subscribe(f"{INBOX}.*")
        alice.publish(ITS.rollout, pack(run), reply=f"{INBOX}.1")
        await alice.hears(2)
        for _ in range(80):
            alice.publish(ITS.server(served.server.server_id), fetch, reply=f"{INBOX}.2")
        await alice.push(b"")
        await work(bus)
        try:
            await alice.hears(82)
        except RefusedError:
            return False
        return True


async def connections_have_no_end(bus: AttackedBus) -> bool:
    async with AsyncExitStack() as stack:
        return await connected(bus, stack, 40) == 40


async def connected(bus: AttackedBus, stack: AsyncExitStack, count: int) -> int:
    """Alice opens so many connections; returns how many she has."""
    opened = 0
    with contextlib.suppress(RefusedError, OSError):
        for _ in range(count):
            await stack.enter_async_context(bus.wire("alice"))
            opened += 1
    return opened


BOUNDS: dict[str, tuple[Callable[[AttackedBus], Any], dict[str, int]]] = {
    "giant messages": (giant_message_arrives, {"max_payload": 8 * MIB}),
    "endless protocol lines": (endless_line_is_read, {"max_control_line": 2**17}),
    "subscription exhaustion": (subscriptions_have_no_end, {"max_subscriptions": 10_000}),
    "a slow consumer": (pending_data_has_no_end, {"max_pending": 512 * MIB}),
    "connections without end": (connections_have_no_end, {"max_connections": 100}),
}
"""Each with the limits without which it succeeds."""


@pytest.mark.parametrize("name", BOUNDS)
async def test_what_has_a_bound(mode: str, name: str) -> None:
    attack, _ = BOUNDS[name]
    async with AttackedBus.opened(generated(mode, **LIMITS)) as bus:
        assert not await attack(bus)
        async with bus.serving():
            await work(bus)


@pytest.mark.parametrize("name", BOUNDS)
async def test_it_has_none_without_its_limit(mode: str, name: str) -> None:
    attack, limits = BOUNDS[name]
    access = generated(mode, **LIMITS)
    for limit_name, value in limits.items():
        access = access.changed(limit, limit_name, value)
    async with AttackedBus.opened(access) as bus:
        assert await attack(bus)


@pytest.mark.parametrize("limits", [{}, {"max_connections": 30}], ids=["bounded", "unbounded"])
async def test_all_connections_of_nats(limits: dict[str, int]) -> None:
    """Where trainers have accounts: one of them opens connections until it gets no more, then another comes."""
    access = generated("accounts", **LIMITS)
    for name, value in limits.items():
        access = access.changed(limit, name, value)
    async with AttackedBus.opened(access) as bus, AsyncExitStack() as stack:
        assert await connected(bus, stack, 40) == (30 if limits else 5)
        if limits:
            with pytest.raises((RefusedError, OSError)):
                await stack.enter_async_context(bus.wire("bob"))
        else:
            await stack.enter_async_context(bus.wire("bob"))


async def test_who_is_connected_stays_so(mode: str) -> None:
    """Also where all connections are taken: those that are there work on."""
    async with AttackedBus.opened(generated(mode, **LIMITS)) as bus, AsyncExitStack() as stack:
        await stack.enter_async_context(bus.serving())
        client = await stack.enter_async_context(bus.client("bob"))
        await all_done(client, 1)
        await connected(bus, stack, 40)
        await all_done(client, 5)


# ---- what envbus bounds


async def flood(alice: Wire, message: Callable[[int], tuple[str, bytes]]) -> None:
    """As fast as NATS takes it."""
    alice.subscribe(f"{INBOX}.*")
    for number in range(FLOOD):
        subject, data = message(number)
        alice.publish(subject, data, reply=f"{INBOX}.{number}")
        if number % 100 == 0:
            await alice.push(b"")
    await alice.settle()


def valid(number: int) -> tuple[str, bytes]:
    body = encode({"model": "m", "input": {"prompt": [], "example_id": number}})
    return ITS.rollout, pack(Run(job=f"a{number}", attempt=1, client="a1", call="rollout", size=1, body=body))


def garbage(number: int) -> tuple[str, bytes]:
    return (ITS.rollout, ITS.wait)[number % 2], secrets.token_bytes(50)


@pytest.mark.parametrize("message", [valid, garbage], ids=lambda message: message.__name__)
async def test_a_flood_while_others_work(
    mode: str, shared_bus: AttackedBus, message: Callable[[int], tuple[str, bytes]]
) -> None:
    await shared_bus.use(generated(mode))
    async with shared_bus.serving() as served, shared_bus.wire("alice") as alice:
        async with shared_bus.client("bob") as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(flood(alice, message))
            await all_done(client, 20)
        assert served.state == "ready"


async def answers_to_garbage(bus: AttackedBus) -> int:
    """How many of so many bad messages a server answers."""
    async with bus.serving() as served, bus.wire("alice") as alice:
        for _ in range(FLOOD):
            alice.publish(ITS.wait, b"garbage", reply=f"{INBOX}.1")
        await alice.push(b"")
        await becomes(lambda: served.counts["refused"] >= FLOOD)
        alice.subscribe(f"{INBOX}.*")
        await alice.settle()
        return served.counts["refused"] - served.counts["unanswered"]


async def test_a_server_answers_only_so_much_garbage(
    mode: str, shared_bus: AttackedBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shared_bus.use(generated(mode))
    assert await answers_to_garbage(shared_bus) < FLOOD
    monkeypatch.setattr(Allowance, "take", lambda self, now: True)
    assert await answers_to_garbage(shared_bus) == FLOOD


async def bob_goes_last(bus: AttackedBus) -> bool:
    """Alice has many jobs and bob a few that come later: whether hers all end before the last of his."""
    async with bus.serving(slots=1) as served, bus.client("alice") as alice, bus.client("bob") as bob:
        order: list[str] = []

        async def run(client: NATSEnvClient, name: str, *, hold: bool = False) -> None:
            await client.run_rollout({"prompt": [], "example_id": name, "hold": hold}, None, "m")  # type: ignore[typeddict-unknown-key]
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run(alice, "alice", hold=True))
            await becomes(lambda: bool(served.env.started))
            for _ in range(40):
                tasks.create_task(run(alice, "alice"))
            line = served.server._desks.reception.slots.line
            await becomes(lambda: line.jobs >= 40)
            for _ in range(5):
                tasks.create_task(run(bob, "bob"))
            await becomes(lambda: line.jobs >= 45)
            served.env.let_go.set()
        return "bob" not in order[:40]


async def test_a_queue_full_of_jobs(mode: str, shared_bus: AttackedBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns go round by client, however many jobs each has."""
    await shared_bus.use(generated(mode))
    assert not await bob_goes_last(shared_bus)

    def first_come(line: Line, *, without: Any = ()) -> tuple[str, str] | None:
        waiter: Waiter | None = next(iter(line._waiters.values()), None)
        if waiter is None:
            return None
        waiter.jobs -= 1
        if waiter.jobs == 0:
            line.remove(waiter.client)
        return waiter.client, waiter.inbox

    monkeypatch.setattr(Line, "next", first_come)
    assert await bob_goes_last(shared_bus)
