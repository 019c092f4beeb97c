"""Which envs and servers are on a bus, as their heartbeats say."""

from __future__ import annotations

import asyncio
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.messages import Beat, parse_as
from envbus.bus.subjects import all_beats
from envbus.errors import EnvbusError

LISTEN_S = 1.3
"""A little over one beat interval."""


async def hear_beats(connection: Connection, prefix: str, *, listen_s: float = LISTEN_S) -> list[Beat]:
    """Listen for a while and return the latest beat of each server. On the bus loop."""
    beats: dict[str, Beat] = {}

    def on_beat(message: Any) -> None:
        try:
            beat = parse_as(message.data, Beat)
        except EnvbusError:
            return
        beats[beat.server] = beat

    subscription = await connection.subscribe(all_beats(prefix), on_beat)
    try:
        await asyncio.sleep(listen_s)
    finally:
        await connection.leave(subscription)
    return sorted(beats.values(), key=lambda beat: (beat.env, beat.started_at))
