"""Heartbeats of one server, and how far the env's loop lags behind. Runs on the bus thread.

The beats leave from here whatever the environment's code does; a loop that
does not answer shows as lag, not as silence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections.abc import Callable

import psutil

from envbus.bus.connection import Connection
from envbus.bus.messages import Beat, pack
from envbus.bus.subjects import Subjects
from envbus.bus.thread import Crossing
from envbus.server.identity import Identity
from envbus.server.reception import Reception
from envbus.server.rollout_log import CLIENT_DIGITS

MAX_CLIENTS_TOLD = 20


class LoopLag:
    """Measures how long another thread's loop takes to run something.

    Args:
        loop: Crossing to the loop that is watched.
        back: Crossing to the loop that measures.
    """

    def __init__(self, loop: Crossing, back: Crossing) -> None:
        self._loop = loop
        self._back = back
        self._asked_at: float | None = None
        self._last_s = 0.0

    def measure(self) -> float:
        """Return the lag in seconds as known now, and ask again."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._loop.post(self._back.post, self._answered, now)
            return self._last_s
        return max(self._last_s, now - self._asked_at)

    def _answered(self, asked_at: float) -> None:
        self._last_s = time.monotonic() - asked_at
        self._asked_at = None


class Beats:
    """Publishes a server's state once per interval."""

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        reception: Reception,
        *,
        identity: Identity,
        lag: Callable[[], float],
        interval_s: float,
        controller: str | None = None,
    ) -> None:
        self._connection = connection
        self._subject = subjects.beat(identity.server_id)
        self._reception = reception
        self._identity = identity
        self._lag = lag
        self._interval_s = interval_s
        self._controller = controller
        self._started_at = time.time()
        self._process = psutil.Process()
        self.error: str | None = None
        """Why the environment could not be loaded; the beat's state is then ``failed``."""

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await self.send()
            await asyncio.sleep(self._interval_s)

    async def send(self) -> None:
        """Beat once, now; skipped while the connection is down, and logged if it fails."""
        recent = self._reception.rollouts.take_recent()
        try:
            await self._connection.publish(self._subject, pack(self.now().model_copy(update={"recent": recent})))
        except Exception as error:  # noqa: BLE001 - one that fails must not end the others: silence looks like death
            text = f"a heartbeat was not sent: {error}"
            self._reception.notices.note("beat not sent", text, time.monotonic(), level=logging.ERROR)

    def now(self) -> Beat:
        """Return the state as a heartbeat without its recent rollouts."""
        reception, counts, identity = self._reception, self._reception.counts, self._identity
        slots, rollouts = reception.slots, reception.rollouts
        state = reception.state
        if state == "ready" and (slots.in_flight >= slots.capacity or slots.is_short_of_memory):
            state = "full"
        return Beat(
            server=identity.server_id,
            env=identity.env,
            state="failed" if self.error is not None else state,
            error=self.error,
            host=platform.node(),
            pid=os.getpid(),
            started_at=self._started_at,
            slots=slots.capacity,
            in_flight=slots.in_flight,
            waiting_clients=len(slots.line),
            waiting_jobs=slots.line.jobs,
            held_results=reception.jobs.held_count,
            held_bytes=reception.jobs.held_bytes,
            short_of_memory=slots.is_short_of_memory,
            done=counts["done"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            busy=counts["busy"],
            loop_lag_s=round(self._lag(), 4),
            oldest_job_s=round(reception.jobs.oldest_age_s(time.monotonic()), 3),
            rss_bytes=self._process.memory_info().rss,
            versions=identity.versions,
            env_id=identity.env_id,
            fingerprint=identity.fingerprint,
            interval_s=self._interval_s,
            controller=self._controller,
            failed_by_type=dict(rollouts.failed_by_type),
            waiting_by_client={
                client[:CLIENT_DIGITS]: jobs for client, jobs in slots.line.longest(MAX_CLIENTS_TOLD).items()
            },
            jobs=counts["jobs"],
            retried=counts["retried"],
            repeated=counts["repeated"],
            orphaned=counts["orphaned"],
            lost_results=counts["lost_results"],
            unconfirmed_results=counts["unconfirmed_results"],
            received_bytes=counts["received_bytes"],
            sent_bytes=counts["sent_bytes"],
            duration_counts=list(rollouts.duration_counts),
            duration_sum_s=round(rollouts.duration_sum_s, 3),
            sent_at=time.time(),
        )
