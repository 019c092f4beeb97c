"""Which of a client's jobs goes out next, and how: pushed to the queue group, or on a server's grant.

Pure: events and a clock value in, instructions out. While servers have room
(credits) jobs are pushed, a few unaccepted at a time. A refusal (no credit
anywhere, or busy) ends that: the client joins the waiting line and sends only
on grants, until nothing of its waits any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Push:
    """Send the job to the queue group."""

    job: str


@dataclass(frozen=True, slots=True)
class UseGrant:
    """Send the job straight to the server that granted."""

    job: str
    server: str
    grant: str


@dataclass(frozen=True, slots=True)
class PassGrant:
    """Give the grant back: nothing waits."""

    server: str
    grant: str


@dataclass(frozen=True, slots=True)
class SayWaiting:
    """Tell all servers how many jobs wait (0: none any more)."""

    jobs: int


Instruction = Push | UseGrant | PassGrant | SayWaiting


class Dispatch:
    """The jobs of one client that no server has accepted.

    Args:
        max_unaccepted: Pushes in flight at once.
        accept_timeout_s: A job that nobody accepted for this long is sent again.
        wait_repeat_s: How often a waiting client says so again.
        regrow_s: How soon it says so when many more jobs wait than servers may still count.
    """

    def __init__(
        self, *, max_unaccepted: int, accept_timeout_s: float, wait_repeat_s: float, regrow_s: float = 0.02
    ) -> None:
        self._max_unaccepted = max_unaccepted
        self._accept_timeout_s = accept_timeout_s
        self._wait_repeat_s = wait_repeat_s
        self._regrow_s = regrow_s
        self._queue: OrderedDict[str, None] = OrderedDict()
        self._sent: dict[str, float] = {}
        """Jobs sent and not yet accepted, with the time at which they are sent again."""
        self.waiting_in_line = False
        self._counted = 0
        """Waiting jobs that every server still counts, at the least."""
        self._said_at = 0.0
        self._connected = True

    def pending(self) -> list[str]:
        """Jobs that no server has accepted."""
        return [*self._sent, *self._queue]

    def submit(self, job: str, now: float) -> list[Instruction]:
        """A new job."""
        self._queue[job] = None
        return self._advance(now)

    def resend(self, job: str, now: float) -> list[Instruction]:
        """A job that lost its server goes to the front."""
        self._sent.pop(job, None)
        self._to_front(job)
        return self._advance(now)

    def remove(self, job: str, now: float) -> list[Instruction]:
        """The job is over for this client, whatever a server may still say."""
        self._queue.pop(job, None)
        self._sent.pop(job, None)
        return self._advance(now)

    def accepted(self, job: str, now: float) -> list[Instruction]:
        """A server has the job."""
        return self.remove(job, now)

    def refused(self, job: str, now: float) -> list[Instruction]:
        """No credit anywhere (503), or the server that got it is busy."""
        if job not in self._sent:
            return []
        del self._sent[job]
        self._to_front(job)
        if not self.waiting_in_line:
            self.waiting_in_line = True
            return self._say(now)
        return self._advance(now)

    def granted(self, server: str, grant: str, now: float) -> list[Instruction]:
        """A server has a slot for one job."""
        if not self._queue or not self._connected:
            self._counted = 0
            return [PassGrant(server, grant)]
        self._counted = max(0, self._counted - 1)
        job, _ = self._queue.popitem(last=False)
        self._sent[job] = now + self._accept_timeout_s
        return [UseGrant(job, server, grant), *self._advance(now)]

    def disconnected(self) -> None:
        """The connection is gone: nothing can be sent or accepted."""
        self._connected = False

    def reconnected(self, now: float) -> list[Instruction]:
        """The connection is back: what was sent may be lost, and servers may have forgotten who waits."""
        self._connected = True
        self._sent = dict.fromkeys(self._sent, now + self._accept_timeout_s)
        self._said_at = 0.0
        return self._advance(now)

    def overdue(self, now: float) -> list[str]:
        """Return the jobs that no server accepted in time, which the next tick sends again."""
        return [job for job, resend_at in self._sent.items() if resend_at <= now] if self._connected else []

    def tick(self, now: float) -> list[Instruction]:
        """What time alone brings about."""
        if not self._connected:
            return []
        late = self.overdue(now)
        for job in reversed(late):
            del self._sent[job]
            self._to_front(job)
        if late and not self.waiting_in_line:
            # A server that hangs keeps its credits and would swallow pushes; grants come from servers that run.
            self.waiting_in_line = True
            return self._say(now)
        return self._advance(now)

    def _advance(self, now: float) -> list[Instruction]:
        if not self._connected:
            return []
        if self.waiting_in_line:
            return self._keep_place(now)
        pushes: list[Instruction] = []
        while self._queue and len(self._sent) < self._max_unaccepted:
            job, _ = self._queue.popitem(last=False)
            self._sent[job] = now + self._accept_timeout_s
            pushes.append(Push(job))
        return pushes

    def _keep_place(self, now: float) -> list[Instruction]:
        waiting = len(self._queue)
        if waiting == 0:
            if self._sent:
                return []
            self.waiting_in_line = False
            return self._say(now)
        grown = waiting > 2 * self._counted and now - self._said_at >= self._regrow_s
        if grown or now - self._said_at >= self._wait_repeat_s:
            return self._say(now)
        return []

    def _say(self, now: float) -> list[Instruction]:
        self._counted, self._said_at = len(self._queue), now
        return [SayWaiting(len(self._queue))]

    def _to_front(self, job: str) -> None:
        self._queue[job] = None
        self._queue.move_to_end(job, last=False)
