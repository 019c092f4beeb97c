"""One client floods a server, with garbage or with valid requests, while another one works (CASES P07, P15, P33).

What NATS has not delivered yet stands before the messages of others, so a flood delays them while
it lasts, as far as a server reads slower than it comes; nothing is lost, and all is bounded.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time

import psutil
from raw_client import RawClient
from stage import ServerProcess, Stage, becomes, do, run, settled

from envbus import NATSEnvClient
from envbus.bus.address import resolve_bus_options
from envbus.bus.connection import MAX_UNSENT_BYTES, Connection
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Fetch, Wait, pack

MIB = 2**20
GARBAGE = 12_000
PUSHES = 20_000
GROWTH_BYTES = 60 * MIB
LATENCY_S = 20.0
"""Of one rollout under a flood; a generous bound for a machine that is busy with other tests."""


def rss_bytes(server: ServerProcess) -> int:
    return int(psutil.Process(server.pid).memory_info().rss)


async def work(client: NATSEnvClient, flood: asyncio.Task[None]) -> list[float]:
    """Run one short rollout after the other while a flood lasts, and some after it; returns how long each took."""
    took_s: list[float] = []
    after = 20
    while after:
        after -= flood.done()
        started = time.monotonic()
        assert (await run(client, do()))["reward"] == 1.0
        took_s.append(time.monotonic() - started)
    await flood
    return took_s


async def test_garbage_at_full_speed_on_every_subject_of_a_server(stage: Stage) -> None:
    server = stage.launch()
    await stage.ready()
    async with RawClient.connect(stage) as raw, stage.client() as client:
        server_id = (await client.info()).server
        its = raw.subjects
        subjects = [its.rollout, its.wait, its.server(server_id), its.info, its.examples, its.ctl(server_id)]
        dice = random.Random(7)
        blobs = [dice.randbytes(dice.randrange(200)) for _ in range(64)]

        async def flood() -> None:
            for number in range(GARBAGE):
                reply = f"{raw.inbox}.{number}" if number % 3 else ""
                await raw.connection.publish(subjects[number % len(subjects)], blobs[number % 64], reply=reply)
                if number % 100 == 0:
                    await asyncio.sleep(0)

        base = rss_bytes(server)
        took_s = await work(client, asyncio.create_task(flood()))
        assert max(took_s) < LATENCY_S
        assert rss_bytes(server) < base + GROWTH_BYTES
        await settled(client)
    await stage.idle()
    assert server.log.count("\n") < 60, "bad messages are counted, not logged each"


async def test_20_000_valid_pushes_of_a_client_that_ignores_busy(stage: Stage) -> None:
    """P15: what a server has no room for is refused at once, and takes neither its memory nor the others' turns."""
    server = stage.launch()
    await stage.ready()
    async with RawClient.connect(stage) as raw, stage.client() as client:
        name = secrets.token_hex(16)
        template = raw.message(name, do(t=0.01))

        async def flood() -> None:
            for number in range(PUSHES):
                job = secrets.token_hex(16)
                data = template.replace(name.encode(), job.encode())
                await raw.connection.publish(raw.subjects.rollout, data, reply=f"{raw.inbox}.{job}")
                if number % 50 == 0:
                    await asyncio.sleep(0)

        base = rss_bytes(server)
        took_s = await work(client, asyncio.create_task(flood()))
        assert max(took_s) < LATENCY_S
        assert rss_bytes(server) < base + GROWTH_BYTES
        await settled(client)
        assert raw.refused.total() > PUSHES / 2
    await stage.idle()


async def test_a_crowd_of_clients_that_wait_and_never_come(stage: Stage) -> None:
    """Who does not use a grant makes room for who does."""
    stage.launch(settings={"grant_ttl_s": 0.3, "wait_ttl_s": 1.0})
    await stage.ready()
    async with RawClient.connect(stage) as raw, stage.client() as client, stage.beats() as beats:
        for _ in range(1500):
            wait = Wait(client=secrets.token_hex(16), n=5)
            await raw.connection.publish(raw.subjects.wait, pack(wait), reply=f"{raw.inbox}.line")
        jobs = asyncio.gather(*(run(client, do()) for _ in range(8)))
        await beats.until(lambda now: all(beat.waiting_clients > 100 for beat in now))
        assert len(await asyncio.wait_for(jobs, 60)) == 8
        await beats.until(lambda now: all(beat.waiting_clients == 0 for beat in now))


async def test_fetches_without_end_of_one_result(stage: Stage) -> None:
    """Each asks for 512 KiB with 100 bytes: what a server has not sent yet is bounded."""
    server = stage.launch()
    await stage.ready()
    async with RawClient.connect(stage) as raw, stage.client() as client:
        job = await raw.run(do("big", n=2 * MIB))
        fetch = pack(Fetch(client=raw.client_id, job=job, index=0))
        base = rss_bytes(server)

        async def flood() -> None:
            for number in range(400):
                await raw.connection.publish(
                    raw.subjects.server(raw.server_of(job)), fetch, reply=f"_INBOX.nobody.{number}"
                )
                if number % 50 == 0:
                    await asyncio.sleep(0)

        took_s = await work(client, asyncio.create_task(flood()))
        assert max(took_s) < LATENCY_S
        assert rss_bytes(server) < base + 3 * MAX_UNSENT_BYTES
        await raw.done(job)


async def test_messages_that_nats_does_not_take_are_bounded(own_nats: EmbeddedNats) -> None:
    """A NATS server that hangs with its connections open: what waits for it has a bound, and the rest is dropped."""
    connection = Connection(resolve_bus_options(own_nats.url), name="slow")
    await connection.open(timeout_s=20)
    try:
        assert own_nats._guard is not None
        nats = next(p for p in psutil.Process(own_nats._guard.pid).children() if p.name() == "nats-server")
        nats.suspend()
        try:
            part = bytes(MIB - 100)
            for _ in range(400):
                connection.send("nobody", part)
                await asyncio.sleep(0)
            assert connection.stats.dropped > 100
            assert connection.unsent_bytes <= MAX_UNSENT_BYTES
        finally:
            nats.resume()
        await becomes(lambda: connection.is_up and connection.unsent_bytes == 0, what="all is sent")
    finally:
        await connection.close()
