"""The places of an env, the servers in them, and how reports show both (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envbus.controller.liveness import Vitals

Phase = Literal["starting", "running", "suspect", "stuck", "draining"]
State = Literal["starting", "running", "suspect", "stuck", "draining", "backoff", "failed", "ended"]


@dataclass(frozen=True, slots=True)
class View:
    """One server, or one empty place, for reports."""

    server: str
    slot: int
    generation: int
    state: State
    restarts: int
    last_exit: str | None


@dataclass(slots=True, eq=False)
class Member:
    """One server process."""

    server: str
    slot: int
    generation: int
    vitals: Vitals
    phase: Phase = "starting"
    ready_at: float | None = None
    asked_at: float | None = None
    kill_at: float | None = None
    """When it is killed if it has not ended by then."""
    drain_again_at: float | None = None
    adopted: bool = False
    """What it does is unknown until it beats."""
    doubt: str = ""
    """Why it is stuck."""


@dataclass(slots=True, eq=False)
class Place:
    """Room for one server."""

    slot: int
    current: Member | None = None
    successor: Member | None = None
    """In a rolling restart: takes over once it is ready."""
    failures: int = 0
    """Unwanted ends since the last healthy period."""
    retry_at: float | None = None
    was_lost: bool = False
    """Its server ended unasked and no other was launched since."""
    restarts: int = 0
    last_server: str = ""
    last_exit: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its server takes jobs."""
        return self.current is not None and self.current.ready_at is not None

    def remove(self, member: Member) -> None:
        """Take a member out; a successor moves up."""
        if self.current is member:
            self.current = self.successor
        self.successor = None
