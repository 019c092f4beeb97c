"""What the tries of one model call met, for its error: how many, how long, and the last answer.

Follows the call through the client library by a context variable: the call and all its tries run in one task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from envbus.errors import ModelAddressError

MAX_EXCERPT_CHARS = 1_000
"""How much of an endpoint's answer goes into an error message."""


@dataclass(slots=True)
class Tries:
    """The tries of one call so far."""

    count: int = 0
    base_url: str = ""
    """Where the last try went."""
    last_answer: str = ""
    """Status and body, cut, of the last answer that was an error; empty if there was none."""
    refusal: ModelAddressError | None = None
    """Why no further try may be made."""
    limit: asyncio.Timeout | None = None
    """The time limit that the call runs under."""
    _started_s: float = field(default_factory=time.monotonic)

    def begin(self, base_url: str) -> None:
        """A try starts."""
        self.count += 1
        self.base_url = base_url

    @property
    def time_is_over(self) -> bool:
        """Whether the call's time limit has cancelled it."""
        return self.limit is not None and self.limit.expired()

    def __str__(self) -> str:
        tries = "1 try" if self.count == 1 else f"{self.count} tries"
        return f"{tries} in {time.monotonic() - self._started_s:.1f} s"

    @property
    def last_words(self) -> str:
        """The last answer, as the end of a sentence; for an error that is not this answer."""
        return f"; the last answer was {self.last_answer}" if self.last_answer else ""


_current: ContextVar[Tries | None] = ContextVar("model_tries", default=None)


@contextmanager
def counted_tries() -> Iterator[Tries]:
    """Count the tries of the call in the block; a call within a call is part of it."""
    outer = _current.get()
    tries = outer or Tries()
    token = _current.set(tries)
    try:
        yield tries
    finally:
        _current.reset(token)


def current_tries() -> Tries:
    """The tries of the call that runs in this task."""
    return _current.get() or Tries()


def excerpt(body: bytes | str) -> str:
    """The beginning of a body, as text."""
    text = body[: 4 * MAX_EXCERPT_CHARS].decode("utf-8", "replace") if isinstance(body, bytes) else body
    return text if len(text) <= MAX_EXCERPT_CHARS else text[: MAX_EXCERPT_CHARS - 1] + "…"
