"""Listens to the heartbeats under one prefix and counts them in a Fleet, which lives on another loop.

Parsed on the bus thread. A message counts for what its subject allows it to say:
who may publish there is what NATS checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from envbus.bus.connection import Connection, Listener, Subscription
from envbus.bus.control_messages import ControllerBeat
from envbus.bus.messages import Beat, Gone, WireMessage, parse
from envbus.bus.subjects import all_beats, all_controller_beats, all_gone, controller_beat, parse_beat, parse_gone
from envbus.bus.thread import Crossing
from envbus.controller.fleet import Fleet
from envbus.errors import EnvbusError


class Hearing:
    """The ears of an operator.

    Args:
        fleet: Where beats are counted.
        prefix: First token of all subjects.
    """

    def __init__(self, fleet: Fleet, prefix: str) -> None:
        self._fleet = fleet
        self._prefix = prefix
        self._subscriptions: list[Subscription] = []
        self._listener: Listener | None = None
        self.on_beat: Callable[[Beat], None] = lambda beat: None
        """Called with each server's heartbeat, once the fleet has it; on the fleet's loop."""

    async def open(self, connection: Connection, fleets_loop: Crossing) -> None:
        """Listen. On the bus thread.

        Args:
            connection: Open.
            fleets_loop: Crossing to the loop on which the Fleet is used.
        """

        def on_message(message: Any) -> None:
            now, wall = time.monotonic(), time.time()
            try:
                heard = parse(message.data)
            except EnvbusError:
                return
            fleets_loop.post(self._take, message.subject, heard, now, wall)

        self._subscriptions = [
            await connection.subscribe(subject, on_message, optional=without)
            for subject, without in self._subjects().items()
        ]
        self._listener = Listener(
            lambda: fleets_loop.post(self._down),
            lambda outage_s: fleets_loop.post(self._up),
        )
        connection.listen(self._listener)

    async def check_allowed(self, connection: Connection) -> list[str]:
        """Wait until NATS has judged the subscriptions; returns what is missed. On the bus thread.

        Raises:
            BusPermissionError: This user may not hear servers.
        """
        await connection.check_allowed(all_beats(self._prefix))
        denials = {without: connection.denied("subscribe", subject) for subject, without in self._subjects().items()}
        return [f"{denied}; without it {without}" for without, denied in denials.items() if denied is not None]

    def _subjects(self) -> dict[str, str]:
        """What is listened to, and what is missed without each."""
        return {
            all_beats(self._prefix): "no servers are seen",
            all_controller_beats(self._prefix): "no controllers are seen",
            all_gone(self._prefix): "the end of a server is seen a little later",
        }

    async def close(self, connection: Connection) -> None:
        """Listen no more. On the bus thread."""
        if self._listener is not None:
            connection.unlisten(self._listener)
        for subscription in self._subscriptions:
            await connection.leave(subscription)
        self._subscriptions = []

    def _take(self, subject: str, heard: WireMessage, now: float, wall: float) -> None:
        match heard:
            case Beat() if parse_beat(subject, self._prefix) == (heard.env, heard.server):
                self._fleet.server_beat(heard, now, wall=wall)
                self.on_beat(heard)
            case ControllerBeat() if subject == controller_beat(heard.controller, self._prefix):
                self._fleet.controller_beat(heard, now)
            case Gone() if (env := parse_gone(subject, self._prefix)) is not None:
                self._fleet.gone(heard, now, env=env)

    def _down(self) -> None:
        self._fleet.cut_off(time.monotonic())

    def _up(self) -> None:
        self._fleet.back(time.monotonic())
