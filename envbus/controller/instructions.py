"""What supervision tells the controller to do (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a server process."""

    env: str
    slot: int
    server: str
    generation: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Let it finish its rollouts, however long they take, and end."""

    env: str
    server: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask it to end within its grace; asked twice it cancels its rollouts at once."""

    env: str
    server: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill it and everything that it started."""

    env: str
    server: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask it over the bus whether it lives; any answer counts."""

    env: str
    server: str


@dataclass(frozen=True, slots=True)
class Note:
    """Tell the operator."""

    env: str
    text: str
    level: Literal["info", "warning", "error"] = "info"


Instruction = Launch | Drain | Stop | Kill | Ask | Note
