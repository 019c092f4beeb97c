"""A nats-server of a test's own and what its monitoring says."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import dataclass
from typing import Any

from envbus.bus.embedded import EmbeddedNats


@dataclass(frozen=True)
class MonitoredBus:
    """A nats-server with a monitoring port."""

    nats: EmbeddedNats

    @property
    def url(self) -> str:
        return self.nats.url

    def url_of(self, user: str) -> str:
        """Another address of the same server: clients that use it get a connection of their own."""
        return self.url.replace("nats://", f"nats://{user}:any@")

    async def varz(self) -> dict[str, Any]:
        """What it counts: in_msgs, out_msgs, slow_consumers…"""
        page = f"{self.nats.ports['monitoring'][0]}/varz"

        def read() -> dict[str, Any]:
            with urllib.request.urlopen(page, timeout=20) as answer:
                return dict(json.load(answer))

        return await asyncio.to_thread(read)
