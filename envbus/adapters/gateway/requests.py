"""What a client of either generation asks for, and what a generation's protocol must say (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from envbus.types import ClientConfig

if TYPE_CHECKING:
    from envbus.types import RolloutProgress

Frames = list[bytes]
"""Frames of one message as the client's DEALER sends or receives it: without its identity."""


@dataclass(frozen=True, slots=True)
class Health:
    """Are rollouts taken?"""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request of the same client."""

    request_id: bytes
    target: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Run a rollout or a group.

    Attributes:
        client: Where the model is; None where only the environment can tell, by what is in its input.
        streams: Whether the client wants to be told of progress.
    """

    request_id: bytes
    kind: Literal["rollout", "group"]
    inputs: list[Any]
    client: ClientConfig | None
    model: str
    sampling_args: dict[str, Any]
    max_retries: int = 0
    state_columns: list[str] | None = None
    streams: bool = False


class Dialect(Protocol):
    """The protocol of one generation of the library: requests from frames, frames from answers.

    An answer that is None is not sent.
    """

    def read(self, frames: Sequence[bytes]) -> Health | Cancel | Run:
        """What a message of the right number of frames asks for.

        Raises:
            EnvbusError: Nothing that can be done.
        """
        ...

    def health(self, request_id: bytes, trouble: str | None) -> Frames | None:
        """The answer to Health; trouble says why no rollouts are taken."""
        ...

    def cancel(self, request_id: bytes, was_running: bool) -> Frames | None:
        """The answer to Cancel."""
        ...

    def done(self, run: Run, outputs: list[Any]) -> Frames:
        """The answer to a Run that has a result."""
        ...

    def failed(self, request_id: bytes, error: BaseException) -> Frames:
        """The answer to a request that has none."""
        ...

    def cancelled(self, request_id: bytes) -> Frames:
        """The answer to a Run that its client cancelled."""
        ...

    def stopped(self, request_id: bytes) -> Frames | None:
        """The answer to a Run that ends because the gateway does."""
        ...

    def progress(self, request_id: bytes) -> Callable[[RolloutProgress], list[Frames]]:
        """For one Run: turns each progress of its attempts into messages."""
        ...

    def probe(self) -> Frames:
        """A message that the library's client passes over: sending it shows whether the client is connected."""
        ...
