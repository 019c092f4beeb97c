"""A running NATS server that was provisioned, as its users see it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats

from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.embedded import EmbeddedNats
from envbus.provision.access import AccessSpec
from envbus.provision.folder import provision

WAIT_S = 20


@dataclass(frozen=True)
class SharedNats:
    """A NATS server, who is on it, and the folder with what they connect with."""

    nats: EmbeddedNats
    spec: AccessSpec
    folder: Path

    def options(self, user: str) -> BusOptions:
        """As the user's context says."""
        return resolve_bus_options(context=str(self.folder / "contexts" / f"{user}.json"))

    @asynccontextmanager
    async def connected(self, user: str) -> AsyncIterator[Wire]:
        """Connect with a plain NATS client as a user."""
        options = self.options(user)
        wire = Wire(user)
        callbacks = {"error_cb": wire.on_error, "closed_cb": wire.on_closed}
        wire.client = await nats.connect(**options.nats_kwargs(), **callbacks, allow_reconnect=False)
        try:
            await wire.client.subscribe(f"{options.inbox_prefix}.probe", cb=wire.on_probe)
            yield wire
        finally:
            await wire.client.close()

    async def reload(self, *, rotate: Collection[str] = ()) -> None:
        """Provision again and have NATS take it in."""
        provision(self.spec, self.folder, rotate)
        assert self.nats._directory is not None
        assert self.nats.log_file is not None
        before = self._reloads()
        (self.nats._directory / "nats.conf").write_text((self.folder / "nats.conf").read_text())
        self.nats._signal("HUP")
        await becomes(lambda: self._reloads() > before)

    def _reloads(self) -> int:
        assert self.nats.log_file is not None
        return self.nats.log_file.read_text().count("Reloaded server configuration")


async def becomes(condition: Callable[[], bool]) -> None:
    """Poll what another process changes."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Wire:
    """A plain connection that knows what it was denied."""

    client: Any

    def __init__(self, user: str) -> None:
        self.user = user
        self.errors: list[str] = []
        self.closed = asyncio.Event()
        self._probed = asyncio.Event()

    async def on_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    async def on_closed(self) -> None:
        self.closed.set()

    async def on_probe(self, message: Any) -> None:
        self._probed.set()

    async def judged(self) -> list[str]:
        """What NATS said to all that was sent so far: a message to oneself comes after it."""
        self._probed.clear()
        await self.client.publish(f"_INBOX_{self.user}.probe", b"")
        async with asyncio.timeout(WAIT_S):
            await self._probed.wait()
        said, self.errors = self.errors, []
        return said

    async def is_denied(self, action: str, subject: str) -> bool:
        """Use a right once; a subject to subscribe may have a queue group behind it."""
        if action == "publish":
            await self.client.publish(subject, b"")
        else:
            subject, _, queue = subject.partition(" ")
            await self.client.subscribe(subject, queue=queue, cb=self.on_nothing)
        said = await self.judged()
        assert all("permissions violation" in error and subject.lower() in error for error in said), said
        return bool(said)

    async def on_nothing(self, message: Any) -> None:
        """Take a message."""


Share = Callable[..., AbstractAsyncContextManager[SharedNats]]
"""The fixture ``share``."""
