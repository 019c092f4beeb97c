"""One nats-server with a generated configuration, its users, and the real server and clients of envbus on it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import nkeys
from wire import Wire

from envbus import ClientSettings, NATSEnvClient, NATSEnvServer, ServerSettings
from envbus.bus.address import BusOptions
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.subjects import Subjects
from envbus.environments import progress
from envbus.provision.access import access_of
from envbus.provision.nats_conf import render

ENV = "stage"
ITS = Subjects(ENV)
MODES = ("roles", "accounts")
TRAINERS = ("alice", "bob", "carol")
CLIENT_SETTINGS: dict[str, Any] = {
    "check_interval_s": 0.2,
    "accept_timeout_s": 0.5,
    "wait_repeat_s": 0.3,
    "close_timeout_s": 1.0,
}
SERVER_SETTINGS: dict[str, Any] = {
    "beat_interval_s": 0.1,
    "grant_ttl_s": 0.5,
    "wait_ttl_s": 1.0,
    "grace_s": 0.01,
    "collect_grace_s": 0.01,
}


@dataclass(frozen=True)
class Access:
    """What was generated: the configuration, and the seed of each user."""

    config: str
    seeds: Mapping[str, str]

    def public_key(self, user: str) -> str:
        return public_key(self.seeds[user])

    def changed(self, surgery: Callable[..., str], *details: Any) -> Access:
        """The same users with another configuration."""
        return Access(surgery(self.config, *details), self.seeds)


class HeldEnv:
    """Its rollouts give a blob of ``n`` bytes, those with ``hold`` not before they are let go."""

    requires_group_rollouts = False

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.started: list[Any] = []
        self.cancelled: list[Any] = []

    async def run_rollout(self, item: Any, *arguments: Any, **options: Any) -> Any:
        self.started.append(item["example_id"])
        try:
            if item.get("hold"):
                await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(item["example_id"])
            raise
        await progress.report({"secret": "of its caller"})
        return {"example_id": item["example_id"], "reward": 1.0, "blob": os.urandom(item.get("n", 0))}

    async def run_group(self, items: Any, *arguments: Any, **options: Any) -> Any:
        return [await self.run_rollout(item) for item in items]

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": number} for number in range(5)]

    async def close(self) -> None:
        self.let_go.set()


class AttackedBus:
    """A bus with users."""

    def __init__(self, nats: EmbeddedNats, access: Access) -> None:
        self.nats = nats
        self.access = access

    @classmethod
    @asynccontextmanager
    async def opened(cls, access: Access) -> AsyncIterator[AttackedBus]:
        async with EmbeddedNats(config=access.config) as nats:
            yield cls(nats, access)

    async def use(self, access: Access) -> None:
        """Have nats-server take over another configuration while it runs."""
        if access == self.access:
            return
        assert self.nats._directory is not None
        assert self.nats.log_file is not None
        reloads = self._reloads()
        (self.nats._directory / "nats.conf").write_text(access.config)
        self.nats._signal("HUP")
        await becomes(lambda: self._reloads() > reloads)
        self.access = access

    def _reloads(self) -> int:
        assert self.nats.log_file is not None
        return self.nats.log_file.read_text().count("Reloaded server configuration")

    def wire(self, user: str, **options: Any) -> AbstractAsyncContextManager[Wire]:
        """Connect as a user by hand."""
        return Wire.connect(self.nats.port, seed=self.access.seeds[user], **options)

    def options(self, user: str) -> BusOptions:
        """How envbus connects as a user."""
        return BusOptions(servers=(self.nats.url,), nkey_seed=self.access.seeds[user], inbox_prefix=inbox_prefix(user))

    def client(self, user: str, **settings: Any) -> NATSEnvClient:
        """A trainer or operator that calls the env."""
        return NATSEnvClient(self.options(user), ENV, settings=ClientSettings(**(CLIENT_SETTINGS | settings)))

    @asynccontextmanager
    async def serving(self, user: str = "srv", *, slots: int = 4, **settings: Any) -> AsyncIterator[Served]:
        """Serve the env, until the end of the block or an operator's order."""
        hosted: Any = HeldEnv()
        server = NATSEnvServer(
            ENV,
            address=self.options(user),
            environment=hosted,
            max_concurrent=slots,
            handle_signals=False,
            settings=ServerSettings(**(SERVER_SETTINGS | settings)),
        )
        running = asyncio.create_task(server.run())
        try:
            await _until_ready(server, running)
            yield Served(server, hosted)
        finally:
            hosted.let_go.set()
            await server.close()
            await asyncio.gather(running, return_exceptions=True)


@dataclass(frozen=True)
class Served:
    """A server in this process, and what it serves."""

    server: NATSEnvServer
    env: HeldEnv

    @property
    def state(self) -> str:
        return self.server._desks.reception.state

    @property
    def counts(self) -> Mapping[str, int]:
        return self.server._desks.reception.counts


async def _until_ready(server: NATSEnvServer, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(20):
        while getattr(server, "_desks", None) is None or server._desks.reception.state != "ready":
            if running.done():
                running.result()
            await asyncio.sleep(0.005)


def inbox_prefix(user: str) -> str:
    return f"_INBOX_{user}"


async def becomes(condition: Callable[[], bool], *, timeout_s: float = 20) -> None:
    """Poll what another thread or process changes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        await asyncio.sleep(0.005)


@cache
def generated(mode: str, **limits: int) -> Access:
    """What envbus generates for everybody that the attacks need."""
    spec = access_of(
        servers=["srv", "srv2", "mathsrv"],
        trainers=list(TRAINERS),
        operators=["op"],
        controllers=["ctl1", "ctl2"],
        dashboards=["dash"],
        user={"mathsrv": {"envs": ["math"]}, "carol": {"envs": ["math"]}},
        accounts=mode == "accounts",
        limits=limits,
    )
    seeds = {user.name: new_seed() for user in spec.users}
    access = Access("", seeds)
    return Access(render(spec, {user: access.public_key(user) for user in seeds}), seeds)


def public_key(seed: str) -> str:
    return str(nkeys.from_seed(seed.encode()).public_key.decode())


def new_seed() -> str:
    """The seed of a new user."""
    return bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)).decode()
