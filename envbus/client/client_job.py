"""One call on its way, as its client sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from envbus.bus.transfer import Packed
from envbus.client.progress import Incoming, Report
from envbus.errors import EnvbusError

Reporting = Callable[[Report], None]
"""Gets each report of its progress; called on the bus loop."""
Ending = Callable[[Packed | EnvbusError], None]
"""Gets the result's body, or why there is none; called on the bus loop."""


@dataclass(slots=True)
class ClientJob:
    """A job that has not ended yet.

    Attributes:
        deadline: Seconds since the epoch, if the caller set a limit.
        sent_to: The server whose grant was used; None after a push.
        unanswered: Sends that no server has accepted or refused yet.
        uploading_to: The server that its large input goes to.
        collecting_from: The server that its large result is being fetched from.
        failed_collections: How often that failed.
        reporting: Who wants its progress, if anybody does.
        progress: What came of that.
        held: An outcome that waits for the progress that goes before it, and its server.
        held_checks: How often that server was asked since the last of it came.
        late_since: When a server first refused it as late; 0: none has.
        submitted_at: When the session took it on, by its clock.
        pulled: Whether the outcome is a large result, which takes room until the caller has it.
    """

    job: str
    call: Literal["rollout", "group"]
    size: int
    body: Packed
    ending: Ending
    deadline: float | None = None
    sent_to: str | None = None
    unanswered: int = 0
    uploading_to: str | None = None
    collecting_from: str | None = None
    failed_collections: int = 0
    pulled: bool = False
    late_since: float = 0.0
    submitted_at: float = 0.0
    reporting: Reporting | None = None
    progress: Incoming = field(default_factory=Incoming)
    held: tuple[Packed | EnvbusError, str] | None = None
    held_checks: int = 0

    def forget_attempt(self) -> None:
        """It is sent again: nothing of the last attempt counts any more."""
        self.collecting_from = None
        self.failed_collections = 0
        self.uploading_to = None
        self.held = None
        self.held_checks = 0
