"""Plain requests: a call map without a job, answered by exactly one reply.

Any language's NATS client can make one: see docs/protocol.md.
"""

from __future__ import annotations

import secrets
from typing import Any

from envbus.bus.calls import MAX_GROUP
from envbus.bus.codec import decode_map, encode
from envbus.bus.failures import to_failure
from envbus.bus.messages import PROTOCOL_VERSION, WIRE_LIMITS, Failure, Run
from envbus.bus.transfer import unpack_body
from envbus.errors import BadRequestError, DecodeError, PayloadTooLargeError
from envbus.server.outcomes import HeldResult

_MAP_OF_THREE = b"\x83"
_OK_HEAD = _MAP_OF_THREE + encode({"v": PROTOCOL_VERSION})[1:] + encode({"ok": True})[1:]
"""What turns a result's body, a map of one entry, into a reply: it takes the place of the first byte."""


def as_run(fields: dict[str, Any]) -> Run:
    """Return the job that stands for a plain request.

    Raises:
        BadRequestError: It is no call.
    """
    group = fields.get("group_inputs")
    if group is None and "input" not in fields:
        raise BadRequestError("a request has 'input' (run_rollout) or 'group_inputs' (run_group), or a kind 't'")
    if group is not None and (not isinstance(group, list) or not 0 < len(group) <= MAX_GROUP):
        raise BadRequestError(f"'group_inputs' must be a list of 1 to {MAX_GROUP} inputs")
    size = len(group) if group is not None else 1
    return Run(
        job=secrets.token_hex(16), attempt=1, client="plain", call="rollout" if group is None else "group", size=size
    )


def answer(outcome: HeldResult | Failure, *, max_payload: int) -> bytes:
    """Return the one reply."""
    if isinstance(outcome, Failure):
        return _error(outcome.code, outcome.message, retryable=outcome.retryable, causes=outcome.causes)
    packed = outcome.packed
    size_bytes = len(_OK_HEAD) + packed.raw_size - 1
    if size_bytes > max_payload:
        error = PayloadTooLargeError(size_bytes=size_bytes, limit_bytes=max_payload, what="the result")
        return _error(error.code, f"{error}; or use the job protocol, which sends results in parts")
    return _OK_HEAD + unpack_body(packed.data, packed.encoding, max_bytes=packed.raw_size)[1:]


def is_plain(data: bytes) -> bool:
    """Whether a message that was refused is no message of the job protocol."""
    try:
        return "t" not in decode_map(data, limits=WIRE_LIMITS)
    except DecodeError:
        return True


def refusal(error: BaseException) -> bytes:
    """Return the reply to a request that was refused."""
    failure = to_failure(error, origin="")
    return _error(failure.code, failure.message, retryable=failure.retryable, causes=failure.causes)


def busy(reason: str) -> bytes:
    """Return the reply of a server that cannot take the request now."""
    return _error("busy", f"the server cannot take the request now: {reason}; try again", retryable=True)


def _error(code: str, message: str, *, retryable: bool = False, causes: list[tuple[str, str]] | None = None) -> bytes:
    error = {"code": code, "message": message, "retryable": retryable, "causes": causes or []}
    return encode({"v": PROTOCOL_VERSION, "ok": False, "error": error})
