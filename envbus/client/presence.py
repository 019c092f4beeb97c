"""Which envs and servers are on a bus, as their heartbeats say."""

from __future__ import annotations

import asyncio
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.messages import Beat, parse_as
from envbus.bus.subjects import all_beats, parse_beat
from envbus.errors import BusPermissionError, EnvbusError

LISTEN_S = 1.3
"""A little over one beat interval."""


async def hear_beats(connection: Connection, prefix: str, *, listen_s: float = LISTEN_S) -> list[Beat]:
    """Listen for a while and return the latest beat of each server. On the bus loop.

    Raises:
        BusPermissionError: This user may not hear heartbeats.
    """
    beats: dict[str, Beat] = {}

    def on_beat(message: Any) -> None:
        try:
            beat = parse_as(message.data, Beat)
        except EnvbusError:
            return
        if parse_beat(message.subject, prefix) == (beat.env, beat.server):
            beats[beat.server] = beat  # NATS checks who may publish where, so a beat counts only on its own subject

    subject = all_beats(prefix)
    subscription = await connection.subscribe(subject, on_beat, optional="it is not known which servers there are")
    try:
        await connection.check_allowed(subject)
        await asyncio.sleep(listen_s)
    finally:
        await connection.leave(subscription)
    return sorted(beats.values(), key=lambda beat: (beat.env, beat.started_at))


async def hear_beats_if_allowed(connection: Connection, prefix: str) -> list[Beat] | None:
    """Like hear_beats(), but None for a user that may not hear them."""
    try:
        return await hear_beats(connection, prefix)
    except BusPermissionError:
        return None
