"""One server as a NATS micro service, so that the stock ``nats micro ls``, ``info`` and ``stats`` see it.

Answers $SRV.PING, $SRV.INFO and $SRV.STATS in the JSON of that protocol, for all
services, for this name and for this id. It only tells: the work endpoint takes
its messages by credits as ever. Runs on the bus thread.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from envbus.bus.connection import Connection, Subscription
from envbus.bus.messages import Beat
from envbus.bus.subjects import DISCOVERY, WORK_QUEUE, Subjects
from envbus.server.allowance import Allowance
from envbus.server.catalogue import Catalogue, EndpointUse
from envbus.server.identity import Identity
from envbus.server.reception import Reception

UNDISCOVERED = "'nats micro' does not see this server"
VERBS = ("PING", "INFO", "STATS")
_TYPES = {verb: f"io.nats.micro.v1.{verb.lower()}_response" for verb in VERBS}
_NANOSECONDS = 1_000_000_000


def service_name(env: str) -> str:
    """Return an env's name as a micro service may have it: letters, digits, ``-`` and ``_``."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", env)


def semantic_version(version: str) -> str:
    """Return a version as micro services must have it; what is no number is left out."""
    numbers = [str(int(number)) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return ".".join([*numbers, "0", "0", "0"][:3])


class MicroService:
    """Answers discovery requests for one server.

    Args:
        beat: Gives the server's state as of now.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        reception: Reception,
        catalogue: Catalogue,
        *,
        identity: Identity,
        beat: Callable[[], Beat],
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._reception = reception
        self._catalogue = catalogue
        self._identity = identity
        self._beat = beat
        self._name = service_name(identity.env)
        self._started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        self._allowance = Allowance()
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Answer."""
        for verb in VERBS:
            base = f"{DISCOVERY}.{verb}"
            for subject in (base, f"{base}.{self._name}", f"{base}.{self._name}.{self._identity.server_id}"):
                self._subscriptions.append(
                    await self._connection.subscribe(subject, self._on_request, optional=UNDISCOVERED)
                )

    async def close(self) -> None:
        """Answer no more."""
        for subscription in self._subscriptions:
            await self._connection.leave(subscription)

    def _on_request(self, message: Any) -> None:
        if self._connection.is_inbox(message.reply) and self._allowance.take(time.monotonic()):
            answer = self._answer(message.subject.split(".")[1])
            self._connection.send(message.reply, json.dumps(answer).encode())

    def _answer(self, verb: str) -> dict[str, Any]:
        identity = self._identity
        answer: dict[str, Any] = {
            "type": _TYPES[verb],
            "name": self._name,
            "id": identity.server_id,
            "version": semantic_version(identity.versions["env"]),
            "metadata": self._metadata(),
        }
        if verb == "INFO":
            answer |= {"description": f"envbus environment {printable(identity.env)}", "endpoints": self._endpoints()}
        elif verb == "STATS":
            answer |= {"started": self._started, "endpoints": self._stats()}
        return answer

    def _metadata(self) -> dict[str, str]:
        identity = self._identity
        return {
            "env": printable(identity.env),
            "env_id": printable(identity.env_id),
            "env_version": identity.versions["env"],
            "fingerprint": identity.fingerprint,
            "protocol": identity.versions["protocol"],
        }

    def _endpoints(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "subject": subject, "queue_group": WORK_QUEUE, "metadata": {}}
            for name, subject in self._named_subjects()
        ]

    def _named_subjects(self) -> list[tuple[str, str]]:
        subjects = self._subjects
        return [("rollout", subjects.rollout), ("info", subjects.info), ("examples", subjects.examples)]

    def _stats(self) -> list[dict[str, Any]]:
        beat = self._beat()
        uses = {self._subjects.rollout: self._rollout_use(beat)} | self._catalogue.uses
        stats = [
            {"name": name, "subject": subject, "queue_group": WORK_QUEUE} | _use_stats(uses[subject])
            for name, subject in self._named_subjects()
        ]
        stats[0]["data"] = {
            "state": beat.state,
            "slots": beat.slots,
            "in_flight": beat.in_flight,
            "waiting_jobs": beat.waiting_jobs,
        }
        return stats

    def _rollout_use(self, beat: Beat) -> EndpointUse:
        """Rollouts that ended: one that is under way has no time yet."""
        ended = sum(beat.duration_counts)
        return EndpointUse(ended, beat.failed, beat.duration_sum_s, self._reception.rollouts.last_error)


def _use_stats(use: EndpointUse) -> dict[str, Any]:
    time_ns = int(use.time_s * _NANOSECONDS)
    return {
        "num_requests": use.requests,
        "num_errors": use.errors,
        "last_error": use.last_error,
        "processing_time": time_ns,
        "average_processing_time": time_ns // use.requests if use.requests else 0,
        "data": None,
    }


def printable(name: str) -> str:
    """Return a name without lone surrogates, which JSON readers refuse."""
    return name.encode("utf-8", "replace").decode()
