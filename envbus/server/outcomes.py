"""What a server holds of a finished job until its client has it, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass

from envbus.bus.messages import Announce, Failure, PartReply, Parts, Result, WireMessage, pack
from envbus.bus.transfer import Packed, cut, part_of
from envbus.errors import ResultTooLargeError
from envbus.settings import INLINE_BYTES, PART_BYTES

ENVELOPE_BYTES = 512
"""More than any envelope around a part takes."""


@dataclass(frozen=True, slots=True)
class HeldResult:
    """A result and how it was announced."""

    packed: Packed
    parts: Parts

    @property
    def held_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.packed.data)


Outcome = HeldResult | Failure


def hold(packed: Packed, *, max_payload: int, max_bytes: int) -> HeldResult:
    """Prepare a result for collection.

    Raises:
        ResultTooLargeError: Over the server's ceiling.
    """
    if packed.raw_size > max_bytes:
        raise ResultTooLargeError(
            f"the result has {packed.raw_size:,} bytes, this server's ceiling is {max_bytes:,}; "
            "return less or raise ENVBUS_SERVER_MAX_RESULT_BYTES",
            origin="server",
        )
    return HeldResult(packed, cut(packed, part_bytes(max_payload)))


def part_bytes(max_payload: int) -> int:
    """Return the size of a part that fits on the connection's messages."""
    return max(1, min(PART_BYTES, max_payload - ENVELOPE_BYTES))


def held_size_bytes(outcome: Outcome) -> int:
    """Return what an outcome takes while it is held."""
    if isinstance(outcome, HeldResult):
        return outcome.held_bytes
    return len(outcome.message) + sum(len(kind) + len(text) for kind, text in outcome.causes)


def is_one_message(outcome: Outcome, *, max_payload: int) -> bool:
    """Whether what tells of an outcome has all of it."""
    if isinstance(outcome, Failure):
        return True
    return outcome.held_bytes <= min(INLINE_BYTES, max_payload - ENVELOPE_BYTES)


def tell(
    outcome: Outcome, *, job: str, attempt: int, server: str, max_payload: int, progress: int | None = None
) -> bytes:
    """Return the message that ends a job: its result if it fits, else where to fetch it, or why there is none."""
    message: WireMessage
    if isinstance(outcome, Failure):
        told = {"job": job, "attempt": attempt, "server": server, "progress": progress}
        message = outcome.model_copy(update=told)
    elif is_one_message(outcome, max_payload=max_payload):
        packed = outcome.packed
        message = Result(
            job=job, attempt=attempt, server=server, encoding=packed.encoding, body=packed.data, progress=progress
        )
    else:
        message = Announce(job=job, attempt=attempt, server=server, parts=outcome.parts, progress=progress)
    return pack(message)


def tell_part(outcome: HeldResult, *, job: str, index: int) -> PartReply:
    """Return one part of a held result.

    Raises:
        DecodeError: There is no such part.
    """
    data = part_of(outcome.packed.data, outcome.parts, index)
    return PartReply(job=job, index=index, data=data, parts=outcome.parts)
