"""Who may use a server's slots: running jobs, grants to waiting clients, credits in the queue group.

Pure: events and a clock value in, instructions out. A free slot goes to the
waiting line first; only when the line is empty does it become a credit, which
lets nats-server deliver one more pushed job. running + grants + credits never
exceeds the capacity, but by a group, which may start on one free slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from envbus.server.line import Line


@dataclass(frozen=True, slots=True)
class AddCredits:
    """Let this many more pushed jobs in."""

    count: int


@dataclass(frozen=True, slots=True)
class WithdrawCredits:
    """Leave the queue group; call credits_gone() when no message can arrive any more."""


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Tell a waiting client that it may send one job."""

    client: str
    inbox: str
    grant: str


Instruction = AddCredits | WithdrawCredits | SendGrant


class Slots:
    """The slots of one server.

    Args:
        capacity: Rollouts at once.
        grant_ttl_s: A grant that is not used in this time is taken back.
        wait_ttl_s: A waiting client that is silent for this long leaves the line.
    """

    def __init__(self, capacity: int, *, grant_ttl_s: float, wait_ttl_s: float) -> None:
        self.capacity = capacity
        self.line = Line()
        self.credits = 0
        self._grant_ttl_s = grant_ttl_s
        self._wait_ttl_s = wait_ttl_s
        self._running: dict[str, int] = {}
        self._grants: dict[str, tuple[str, float]] = {}
        self._grant_count = 0
        self._open = False
        self._withdrawing = False

    @property
    def in_flight(self) -> int:
        """Slots that running jobs take."""
        return sum(self._running.values())

    @property
    def free(self) -> int:
        """Slots that nobody runs in or was promised; negative while a group overruns."""
        return self.capacity - self.in_flight - len(self._grants) - self.credits

    def open(self) -> list[Instruction]:
        """Start to take jobs."""
        self._open = True
        return self._settle(0.0)

    def close(self) -> list[Instruction]:
        """Take no more jobs; the line and unused grants are forgotten."""
        self._open = False
        self.line.clear()
        self._grants.clear()
        return self._settle(0.0)

    def wait(self, client: str, *, inbox: str, jobs: int, priority: int, now: float) -> list[Instruction]:
        """A client said how many jobs it has waiting."""
        if not self._open:
            return []
        self.line.put(client, inbox=inbox, jobs=jobs, priority=priority, now=now)
        return self._settle(now)

    def push(self, job: str, size: int, now: float) -> tuple[bool, list[Instruction]]:
        """A job came through the queue group. Returns whether it may run."""
        had_credit = self.credits > 0
        if had_credit:
            self.credits -= 1
        return self._admit(job, size), self._settle(now)

    def bounce(self, now: float) -> list[Instruction]:
        """A message that is no new job used up a credit."""
        self.credits = max(0, self.credits - 1)
        return self._settle(now)

    def redeem(self, grant: str, client: str, job: str, size: int, now: float) -> tuple[bool, list[Instruction]]:
        """A job came straight to this server on a grant. Returns whether it may run."""
        held = self._grants.get(grant)
        if held is not None and held[0] == client:
            del self._grants[grant]
        return self._admit(job, size), self._settle(now)

    def decline(self, grant: str, client: str, now: float) -> list[Instruction]:
        """A client has no use for its grant, so it has nothing waiting."""
        if self._take_back(grant, client):
            self.line.remove(client)
        return self._settle(now)

    def waste(self, grant: str, client: str, now: float) -> list[Instruction]:
        """A client used its grant for a job that does not run here; it keeps its place in the line."""
        self._take_back(grant, client)
        return self._settle(now)

    def _take_back(self, grant: str, client: str) -> bool:
        held = self._grants.get(grant)
        if held is None or held[0] != client:
            return False
        del self._grants[grant]
        return True

    def release(self, job: str, now: float) -> list[Instruction]:
        """A job runs no more."""
        self._running.pop(job, None)
        return self._settle(now)

    def credits_going(self) -> None:
        """The queue subscription is being left for a reason of its own; credits_gone() follows."""
        self._withdrawing = True

    def credits_gone(self, now: float) -> list[Instruction]:
        """The queue subscription is gone, withdrawn or lost with its connection: credits left are free again."""
        self.credits = 0
        self._withdrawing = False
        return self._settle(now)

    def tick(self, now: float) -> list[Instruction]:
        """Take back grants that were not used, forget silent waiters."""
        expired = {grant: client for grant, (client, expires_at) in self._grants.items() if expires_at <= now}
        for grant, client in expired.items():
            del self._grants[grant]
            # It may be dead: no second grant to it before it speaks again.
            self.line.forget_silent(now - self._grant_ttl_s, only=client)
        self.line.forget_silent(now - self._wait_ttl_s)
        return self._settle(now)

    def _admit(self, job: str, size: int) -> bool:
        # A cancelled copy of the same job may still be cleaning up: two of one name are never in.
        admitted = self._open and self.free > 0 and job not in self._running
        if admitted:
            self._running[job] = size
        return admitted

    def _settle(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        while self._open and self.free > 0 and (turn := self.line.next()):
            self._grant_count += 1
            grant = str(self._grant_count)
            self._grants[grant] = (turn[0], now + self._grant_ttl_s)
            instructions.append(SendGrant(client=turn[0], inbox=turn[1], grant=grant))
        wanted_back = not self._open or len(self.line) > 0
        if wanted_back and self.credits > 0 and not self._withdrawing:
            self._withdrawing = True
            instructions.append(WithdrawCredits())
        elif self._open and not wanted_back and 0 < self.free >= self.credits and not self._withdrawing:
            # At least doubled each time, so that a busy server does not join the queue group once per job.
            instructions.append(AddCredits(self.free))
            self.credits += self.free
        return instructions
