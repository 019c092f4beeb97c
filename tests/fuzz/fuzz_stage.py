"""A real server and client on a real bus, a stranger's plain connection beside them, and what must be so afterwards."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from envbus import ClientSettings, NATSEnvClient, NATSEnvServer, ServerSettings
from envbus.bus.subjects import Subjects

ENV = "fuzzed"
BOUND_S = 30.0
"""Every answer must come within this; they come within milliseconds, but machines stall."""
AT_ONCE = 64
TRIES, TRY_S = 6, 5.0
SLOTS = 4


class SmallEnv:
    """Ends at once, whatever it is given; those that are to run together wait for one another."""

    requires_group_rollouts = False

    def __init__(self) -> None:
        self._together = 0
        self._met = asyncio.Event()

    async def run_rollout(self, item: Any, *arguments: Any, **options: Any) -> Any:
        if item.get("meet") is True:
            await self._meet()
        return {"example_id": item.get("example_id"), "reward": 1.0, "blob": bytes(item.get("n", 0))}

    async def _meet(self) -> None:
        self._together += 1
        if self._together == SLOTS:
            self._together = 0
            self._met.set()
            self._met = asyncio.Event()
        else:
            await self._met.wait()

    async def run_group(self, items: Any, *arguments: Any, **options: Any) -> Any:
        return [await self.run_rollout(item) for item in items]

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": number} for number in range(5)]

    async def close(self) -> None:
        pass


class Stranger:
    """Publishes anything anywhere, and sees what comes back."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._answers: dict[str, asyncio.Future[bytes]] = {}

    async def open(self) -> None:
        self._subscription = await self.client.subscribe(f"{self._inbox}.*", cb=self._on_answer)

    async def _on_answer(self, message: Any) -> None:
        answer = self._answers.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message.data)

    async def ask(self, subject: str, data: bytes) -> bytes | None:
        """Return the first answer, b"" for "nobody is there"; None if none comes.

        Asked again as any client does: a server answers only so many bad messages in a second, and
        nats-server may lose a message that a queue group had just left.
        """
        for _ in range(TRIES):
            if (answer := await self._ask_once(subject, data)) is not None:
                return answer
        return None

    async def _ask_once(self, subject: str, data: bytes) -> bytes | None:
        inbox = f"{self._inbox}.{next(self._numbers)}"
        answer = self._answers[inbox] = asyncio.get_running_loop().create_future()
        try:
            await self.client.publish(subject, data, reply=inbox)
            async with asyncio.timeout(TRY_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._answers[inbox]

    async def ask_all(self, questions: Iterable[tuple[str, str, bytes]]) -> dict[str, bytes | None]:
        """Ask ``(name, subject, data)`` many at a time; the answers by name."""
        answers: dict[str, bytes | None] = {}
        queue = iter(questions)

        async def work() -> None:
            for name, subject, data in queue:
                answers[name] = await self.ask(subject, data)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return answers


@asynccontextmanager
async def a_stranger(url: str) -> AsyncIterator[Stranger]:
    client = await nats.connect(url)
    try:
        stranger = Stranger(client)
        await stranger.open()
        yield stranger
    finally:
        await client.close()


class Site:
    """One server in this process, with a client that must go on working."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url = url
        self.subjects = Subjects(ENV, prefix)
        self.server = NATSEnvServer(
            ENV,
            address=url,
            prefix=prefix,
            environment=SmallEnv(),
            max_concurrent=SLOTS,
            handle_signals=False,
            settings=ServerSettings(probe_after_s=0.3, orphan_grace_s=0.3, wait_ttl_s=1, grant_ttl_s=0.5),
        )
        self.client = a_client(url, prefix)

    @property
    def server_subject(self) -> str:
        return self.subjects.server(self.server.server_id)

    async def rollout(self, **fields: Any) -> Any:
        item: Any = {"prompt": [], "example_id": 1} | fields
        return await asyncio.wait_for(self.client.run_rollout(item, None, "m"), BOUND_S)

    def leftovers(self) -> dict[str, int]:
        """What the server's tables hold."""
        reception = self.server._desks.reception
        slots = reception.slots
        assert self.server._runner is not None
        return {
            "jobs": len(reception.jobs),
            "leases": len(reception.jobs._leases),
            "held bytes": reception.jobs.held_bytes,
            "slots": slots.in_flight,
            "grants": len(slots._grants),
            "line": len(slots.line),
            "uploads": len(reception._uploads._assemblies),
            "tasks": len(self.server._runner._tasks),
        }

    async def works_and_is_empty(self) -> None:
        """Rollouts, small and large, succeed; then nothing is left in any table, and every slot can be used."""
        small, large = await asyncio.gather(self.rollout(), self.rollout(n=1_500_000))
        assert (small["reward"], len(large["blob"])) == (1.0, 1_500_000)
        await becomes(lambda: not any(self.leftovers().values()), what=lambda: str(self.leftovers()))
        await asyncio.gather(*(self.rollout(meet=True) for _ in range(SLOTS)))
        await becomes(lambda: not any(self.leftovers().values()), what=lambda: str(self.leftovers()))


def a_client(url: str, prefix: str, **settings: Any) -> NATSEnvClient:
    quick = {"accept_timeout_s": 0.5, "check_interval_s": 0.1, "wait_repeat_s": 0.1, "close_timeout_s": 0.5}
    return NATSEnvClient(url, ENV, prefix=prefix, settings=ClientSettings(**(quick | settings)))


@asynccontextmanager
async def a_site(url: str, prefix: str) -> AsyncIterator[Site]:
    site = Site(url, prefix)
    level = logging.getLogger("envbus").level
    running = asyncio.create_task(site.server.run())
    try:
        await site.client.wait_for_server(timeout_s=BOUND_S)
        yield site
    finally:
        await site.client.close()
        await site.server.close()
        await running
        logging.getLogger("envbus").setLevel(level)  # orders change it


async def becomes(condition: Callable[[], bool], *, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.01)


def assert_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that a stranger sends is an error of this side, and no traceback fills the log."""
    bad = [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert not bad, [f"{record.name}: {record.getMessage()} {record.exc_info}" for record in bad[:5]]
