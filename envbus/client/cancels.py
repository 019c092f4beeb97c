"""Cancels, said until they are heard: a message may be lost on the way, and a server may be away for a while.

A server that was taken for gone and comes back still runs its copies of jobs that
run elsewhere by then. On the bus loop.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.messages import Cancel, Ok, pack, parse
from envbus.bus.subjects import Subjects
from envbus.client.job_lists import jobs_per_message
from envbus.errors import EnvbusError

REPEAT_S = 1.0
KEEP_S = 300.0
"""A server that is back later cancels the copies itself, as nobody asked about them."""


class Cancels:
    """The cancels of one client that no server has confirmed.

    Args:
        is_unplaced: Whether no server has a job, so that a copy of it may just as well go on.
    """

    def __init__(
        self, connection: Connection, subjects: Subjects, *, client_id: str, is_unplaced: Callable[[str], bool]
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._client_id = client_id
        self._is_unplaced = is_unplaced
        self._owed: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """Jobs by server, with the time of the first try."""
        self._asked: dict[str, list[str]] = {}
        """What a server is to confirm: one message at a time, and what comes meanwhile goes with the next."""
        self._said_at = 0.0
        self._token = connection.inbox.route(self._on_answer)

    def __len__(self) -> int:
        return sum(map(len, self._owed.values()))

    def close(self) -> None:
        """Say nothing more."""
        self._connection.inbox.unroute(self._token)

    def say(self, server: str, jobs: Iterable[str], now: float) -> None:
        """Tell a server to stop these jobs, now and until it confirms."""
        self.owe(server, jobs, now)
        if server not in self._asked:
            self._send(server)

    def owe(self, server: str, jobs: Iterable[str], now: float) -> None:
        """Tell it once it is back."""
        if jobs := dict.fromkeys(jobs, now):
            self._owed[server] |= jobs

    def _send(self, server: str) -> None:
        owed = (job for job in self._owed.get(server, ()) if not self._is_unplaced(job))
        if jobs := list(itertools.islice(owed, jobs_per_message(self._connection.max_payload))):
            self._asked[server] = jobs
            data = pack(Cancel(client=self._client_id, jobs=jobs))
            reply = self._connection.inbox.reply_subject(self._token)
            self._connection.send(self._subjects.server(server), data, reply=reply)

    def withdraw(self, server: str, job_id: str) -> None:
        """The job shall run there after all."""
        if server in self._owed:
            self._owed[server].pop(job_id, None)
            self._drop_empty(server)

    def tick(self, now: float) -> None:
        """Say again what was not confirmed; after a time no more."""
        if now - self._said_at < REPEAT_S:
            return
        self._said_at = now
        self._asked.clear()
        for server, jobs in list(self._owed.items()):
            self._owed[server] = {job: since for job, since in jobs.items() if now - since < KEEP_S}
            self._drop_empty(server)
            self._send(server)

    def _on_answer(self, message: Any) -> None:
        try:
            answer = parse(message.data)
        except EnvbusError:
            return  # a 503, mostly: it is not back yet
        if isinstance(answer, Ok):
            for job in self._asked.pop(answer.server, ()):
                self.withdraw(answer.server, job)
            self._send(answer.server)

    def _drop_empty(self, server: str) -> None:
        if not self._owed[server]:
            del self._owed[server]
