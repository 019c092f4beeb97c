"""Which envs and servers are on a bus, and why an env has none, as their heartbeats say."""

from __future__ import annotations

import asyncio
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.control_messages import ControllerBeat
from envbus.bus.messages import Beat, parse_as
from envbus.bus.subjects import all_beats, all_controller_beats
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


async def hear_troubles(connection: Connection, env: str, prefix: str, *, listen_s: float = LISTEN_S) -> list[str]:
    """Listen for a while and return what controllers say about servers of an env that ended. On the bus loop."""
    troubles: dict[str, str] = {}

    def on_beat(message: Any) -> None:
        try:
            beat = parse_as(message.data, ControllerBeat)
        except EnvbusError:
            return
        exits = [process.last_exit for process in beat.processes if process.env == env and process.last_exit]
        given_up = [report.failed for report in beat.envs if report.env == env and report.failed]
        for trouble in [*exits[-1:], *given_up]:
            troubles[beat.controller] = f"controller {beat.controller} on host {beat.host} says: {trouble}"

    subscription = await connection.subscribe(all_controller_beats(prefix), on_beat)
    try:
        await asyncio.sleep(listen_s)
    finally:
        await connection.leave(subscription)
    return sorted(troubles.values())
