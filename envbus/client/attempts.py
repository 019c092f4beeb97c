"""Which servers hold which of a client's jobs, and what their silence means.

Pure: events and a clock value in, instructions out. A 503 makes sure that a
server is gone; no answer only makes it stalled. A job that lost its server is
sent again under the same id; the first complete result wins and every other
attempt is cancelled. Attempts are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Resend:
    """Send the job again."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collect:
    """The server has an outcome of the job: fetch it."""

    job: str
    server: str


@dataclass(frozen=True, slots=True)
class CancelOn:
    """Tell the server to stop these jobs."""

    server: str
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The job used up its attempts."""

    job: str
    attempts: int
    reason: str


Instruction = Resend | Collect | CancelOn | Lost


@dataclass(slots=True)
class _Track:
    attempt: int = 1
    servers: set[str] = field(default_factory=set)
    """Servers that accepted the job and may still run it."""
    asked_again: bool = False
    """Sent again because its servers stall; the next acceptance is awaited."""
    reasons: list[str] = field(default_factory=list)
    """Why it was sent again, each time."""


@dataclass(slots=True)
class _Server:
    jobs: set[str] = field(default_factory=set)
    heard_at: float = 0.0


class Attempts:
    """The jobs of one client and the servers that accepted them.

    Args:
        max_attempts: Servers that may be lost under one job.
        stall_timeout_s: A server without an answer for this long is stalled.
    """

    def __init__(self, *, max_attempts: int, stall_timeout_s: float) -> None:
        self._max_attempts = max_attempts
        self._stall_timeout_s = stall_timeout_s
        self._tracks: dict[str, _Track] = {}
        self._servers: dict[str, _Server] = {}

    def __len__(self) -> int:
        return len(self._tracks)

    def attempt(self, job: str) -> int:
        """Return the number of the job's current attempt, from 1."""
        return self._tracks[job].attempt

    def history(self, job: str) -> tuple[str, ...]:
        """Return why the job was sent again, each time."""
        return tuple(self._tracks[job].reasons)

    def holders(self) -> dict[str, tuple[str, ...]]:
        """Return the jobs that each server holds: whom to check about what."""
        return {server_id: tuple(sorted(server.jobs)) for server_id, server in self._servers.items()}

    def servers(self) -> list[str]:
        """Return the servers that hold jobs."""
        return list(self._servers)

    def start(self, job: str) -> None:
        """A new job."""
        self._tracks[job] = _Track()

    def accepted(self, job: str, server: str, now: float) -> list[Instruction]:
        """A server says that the job is its own. One that comes late is told to stop."""
        track = self._tracks.get(job)
        if track is None or (track.servers and server not in track.servers and not track.asked_again):
            return [CancelOn(server, (job,))]
        track.asked_again = False
        track.servers.add(server)
        self._servers.setdefault(server, _Server()).jobs.add(job)
        self.heard(server, now)
        return []

    def is_unplaced(self, job: str) -> bool:
        """Whether the job waits for a server to take it."""
        track = self._tracks.get(job)
        return track is not None and not track.servers

    def is_held_by(self, job: str, server: str) -> bool:
        """Whether this server accepted the job and may still run it."""
        return self._is_on(job, server)

    def is_awaited_from(self, job: str, server: str) -> bool:
        """Whether this server's word on the job counts: it holds the job, or nobody does yet."""
        track = self._tracks.get(job)
        return track is not None and (server in track.servers or not track.servers)

    def heard(self, server: str, now: float) -> None:
        """A server answered."""
        if server in self._servers:
            self._servers[server].heard_at = now

    def status(self, server: str, *, done: Iterable[str], unknown: Iterable[str], now: float) -> list[Instruction]:
        """A server answered a check."""
        self.heard(server, now)
        instructions: list[Instruction] = [Collect(job, server) for job in done if self._is_on(job, server)]
        for job in unknown:
            if self._is_on(job, server):
                instructions += self._server_lost(job, server, f"server {server[:8]} no longer knew the job")
        return instructions

    def gone(self, server: str) -> list[Instruction]:
        """A server's connection is gone for sure (503)."""
        holder = self._servers.get(server)
        instructions: list[Instruction] = []
        for job in sorted(holder.jobs) if holder else ():
            instructions += self._server_lost(job, server, f"server {server[:8]} is gone")
        return instructions

    def outcome_lost(self, job: str, server: str, reason: str) -> list[Instruction]:
        """A result could not be collected: to be run again."""
        if not self._is_on(job, server):
            return []
        return self._server_lost(job, server, reason)

    def finish(self, job: str, server: str | None) -> list[Instruction]:
        """The job is over: delivered from this server, or given up (None). Other attempts are cancelled."""
        track = self._tracks.pop(job, None)
        if track is None:
            return []
        others = sorted(track.servers - {server})
        for holder in sorted(track.servers):
            self._forget(job, holder)
        return [CancelOn(other, (job,)) for other in others]

    def shift_clocks(self, outage_s: float) -> None:
        """This client was cut off: for that long no server could have been heard."""
        for server in self._servers.values():
            server.heard_at += outage_s

    def tick(self, now: float) -> list[Instruction]:
        """Send the jobs of stalled servers again."""
        instructions: list[Instruction] = []
        for server_id, server in sorted(self._servers.items()):
            if now - server.heard_at >= self._stall_timeout_s:
                for job in sorted(server.jobs):
                    instructions += self._stalled(job, server_id, now)
        return instructions

    def _stalled(self, job: str, server_id: str, now: float) -> list[Instruction]:
        track = self._tracks[job]
        if track.asked_again or any(now - self._servers[s].heard_at < self._stall_timeout_s for s in track.servers):
            return []
        track.reasons.append(f"server {server_id[:8]} gave no answer for {self._stall_timeout_s:g} s")
        return self._next_attempt(job)

    def _server_lost(self, job: str, server: str, reason: str) -> list[Instruction]:
        track = self._tracks[job]
        track.servers.discard(server)
        self._forget(job, server)
        track.reasons.append(reason)
        if track.servers or track.asked_again:
            return []
        return self._next_attempt(job)

    def _next_attempt(self, job: str) -> list[Instruction]:
        track = self._tracks[job]
        track.asked_again = True
        if track.attempt >= self._max_attempts:
            return [Lost(job, track.attempt, "; ".join(track.reasons))]
        track.attempt += 1
        return [Resend(job, track.reasons[-1])]

    def _is_on(self, job: str, server: str) -> bool:
        track = self._tracks.get(job)
        return track is not None and server in track.servers

    def _forget(self, job: str, server: str) -> None:
        holder = self._servers.get(server)
        if holder is not None:
            holder.jobs.discard(job)
            if not holder.jobs:
                del self._servers[server]
