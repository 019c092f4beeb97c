"""Who may use a server's slots: running jobs, grants to waiting clients, credits in the queue group.

Pure: events and a clock value in, instructions out. A free slot goes to the
waiting line first; only when the line is empty does it become a credit, which
lets nats-server deliver one more pushed job. running + grants + credits never
exceeds the capacity, but by a group, which may start on one free slot. While
memory is short nothing new comes in, or nothing of a client that uses half of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from envbus.server.line import NOBODY, Line


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
        max_inputs_bytes: While the inputs of running jobs take this much, no more come in; from one client, while
            its own take half of it.
    """

    def __init__(
        self, capacity: int, *, grant_ttl_s: float, wait_ttl_s: float, max_inputs_bytes: int | None = None
    ) -> None:
        self.capacity = capacity
        self.line = Line()
        self.credits = 0
        self._grant_ttl_s = grant_ttl_s
        self._wait_ttl_s = wait_ttl_s
        self._max_inputs_bytes = max_inputs_bytes
        self._running: dict[str, tuple[int, int, str]] = {}
        """Job → slots, bytes of input, client."""
        self.in_flight = 0
        self.inputs_bytes = 0
        self._inputs: Counter[str] = Counter()
        """Client → bytes of input."""
        self._heavy: set[str] = set()
        """Clients whose inputs take half of the memory for them."""
        self._is_full = False
        self._held_back = NOBODY
        self._grants: dict[str, tuple[str, float]] = {}
        self._grant_count = 0
        self._open = False
        self._withdrawing = False

    @property
    def is_short_of_memory(self) -> bool:
        """Whether no work is taken until results are collected or inputs are done with."""
        inputs_are_full = self._max_inputs_bytes is not None and self.inputs_bytes >= self._max_inputs_bytes
        return self._is_full or inputs_are_full

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

    def hold_back(self, *, is_full: bool, clients: frozenset[str], now: float) -> list[Instruction]:
        """Results that wait to be collected take all the memory for them, or too much of it for these clients."""
        self._is_full, self._held_back = is_full, clients
        return self._settle(now)

    def wait(self, client: str, *, inbox: str, jobs: int, priority: int, now: float) -> list[Instruction]:
        """A client said how many jobs it has waiting."""
        if not self._open:
            return []
        self.line.put(client, inbox=inbox, jobs=jobs, priority=priority, now=now)
        return self._settle(now)

    def push(
        self, job: str, size: int, now: float, *, client: str = "", input_bytes: int = 0
    ) -> tuple[bool, list[Instruction]]:
        """A job came through the queue group. Returns whether it may run."""
        self.credits = max(0, self.credits - 1)
        return self._admit(job, client, size=size, input_bytes=input_bytes), self._settle(now)

    def bounce(self, now: float) -> list[Instruction]:
        """A message that is no new job used up a credit."""
        self.credits = max(0, self.credits - 1)
        return self._settle(now)

    def redeem(
        self, grant: str, client: str, job: str, size: int, now: float, *, input_bytes: int = 0
    ) -> tuple[bool, list[Instruction]]:
        """A job came straight to this server on a grant. Returns whether it may run."""
        self._take_back(grant, client)
        return self._admit(job, client, size=size, input_bytes=input_bytes), self._settle(now)

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
        size, input_bytes, client = self._running.pop(job, (0, 0, ""))
        self.in_flight -= size
        self._count_input(client, -input_bytes)
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

    def _admit(self, job: str, client: str, *, size: int, input_bytes: int) -> bool:
        has_room = self.free > 0 and not self.is_short_of_memory and client not in self._left_out
        # A cancelled copy of the same job may still be cleaning up: two of one name are never in.
        admitted = self._open and has_room and job not in self._running
        if admitted:
            self._running[job] = size, input_bytes, client
            self.in_flight += size
            self._count_input(client, input_bytes)
        return admitted

    def _count_input(self, client: str, more_bytes: int) -> None:
        self.inputs_bytes += more_bytes
        self._inputs[client] += more_bytes
        if self._max_inputs_bytes is not None and 2 * self._inputs[client] >= self._max_inputs_bytes:
            self._heavy.add(client)
        else:
            self._heavy.discard(client)
        if not self._inputs[client]:
            del self._inputs[client]

    @property
    def _left_out(self) -> AbstractSet[str]:
        return self._held_back | self._heavy

    def _settle(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        is_open = self._open and not self.is_short_of_memory
        left_out = self._left_out
        while is_open and self.free > 0 and (turn := self.line.next(without=left_out)):
            self._grant_count += 1
            grant = str(self._grant_count)
            self._grants[grant] = (turn[0], now + self._grant_ttl_s)
            instructions.append(SendGrant(client=turn[0], inbox=turn[1], grant=grant))
        wanted_back = not is_open or self.line.has_turn(without=left_out)
        if wanted_back and self.credits > 0 and not self._withdrawing:
            self._withdrawing = True
            instructions.append(WithdrawCredits())
        elif not wanted_back and 0 < self.free >= self.credits and not self._withdrawing:
            # At least doubled each time, so that a busy server does not join the queue group once per job.
            instructions.append(AddCredits(self.free))
            self.credits += self.free
        return instructions
