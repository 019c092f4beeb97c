"""What supervision tells the controller to do (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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
    """Tell the operator.

    Attributes:
        server: Whom it is about, if it is one server.
        facts: What else is known of it: pid, jobs in flight, how it ended.
    """

    env: str
    text: str
    level: Literal["info", "warning", "error"] = "info"
    server: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The text, with the facts that it does not state behind its first line."""
        first, end, rest = self.text.partition("\n")
        unsaid = {name: value for name, value in self.facts.items() if not (isinstance(value, str) and value in first)}
        facts = " ".join(f"{name}={value}" for name, value in unsaid.items())
        return (f"{first} [{facts}]" if facts else first) + end + rest


Instruction = Launch | Drain | Stop | Kill | Ask | Note
