"""Tells servers which outcomes are here, until they have heard it: they hold each until then.

Receipts are gathered for a moment. What a server never hears of ends there by its
own limits, or with this client. On the bus loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence

from envbus.bus.connection import Connection
from envbus.bus.messages import Done, pack
from envbus.bus.subjects import Subjects
from envbus.bus.tasks import TaskSet
from envbus.client.job_lists import in_messages
from envbus.errors import EnvbusError, NoServerError
from envbus.settings import PROBE_TIMEOUT_S

log = logging.getLogger("envbus.client")

GATHER_S = 0.05
TRIES = 60
RETRY_S = 1.0
"""A server without a connection may be back after this; one that has died costs so many requests."""


class Receipts:
    """The outcomes of one client that their servers may still hold; its length counts what was not said once."""

    def __init__(self, connection: Connection, subjects: Subjects, *, client_id: str, tasks: TaskSet) -> None:
        self._connection = connection
        self._subjects = subjects
        self._client_id = client_id
        self._tasks = tasks
        self._gathered: defaultdict[str, list[str]] = defaultdict(list)
        self._under_way = 0

    def __len__(self) -> int:
        return self._under_way + sum(map(len, self._gathered.values()))

    def add(self, server: str, job_id: str) -> None:
        """The outcome of a job is here."""
        if not self._gathered:
            asyncio.get_running_loop().call_later(GATHER_S, self._flush)
        self._gathered[server].append(job_id)

    async def close(self) -> None:
        """Tell what is gathered, once."""
        gathered, self._gathered = self._gathered, defaultdict(list)
        limit = self._connection.max_payload
        lists = [(server, some) for server, jobs in gathered.items() for some in in_messages(jobs, limit)]
        await asyncio.gather(*(self._hand_in(server, some, tries=1) for server, some in lists))

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, defaultdict(list)
        for server, jobs in gathered.items():
            for some in in_messages(jobs, self._connection.max_payload):
                self._tasks.spawn(self._hand_in(server, some, tries=TRIES))

    async def _hand_in(self, server: str, jobs: Sequence[str], *, tries: int) -> None:
        message = pack(Done(client=self._client_id, jobs=list(jobs)))
        self._under_way += len(jobs)
        try:
            heard = await self._is_heard(server, message)
        finally:
            self._under_way -= len(jobs)
        for _ in range(tries - 1):
            if heard:
                return
            await asyncio.sleep(RETRY_S)
            heard = await self._is_heard(server, message)

    async def _is_heard(self, server: str, message: bytes) -> bool:
        try:
            await self._connection.request(self._subjects.server(server), message, timeout_s=PROBE_TIMEOUT_S)
        except (NoServerError, TimeoutError):
            return False
        except EnvbusError as error:
            log.debug("server %s refused a receipt: %s", server, error)
        return True
