"""Errors as Failure messages and back: the type is kept where both sides know it."""

from __future__ import annotations

from envbus.bus.messages import Failure
from envbus.errors import CallError, EnvbusError, RemoteError

MAX_TEXT = 2000
"""Characters of a message that cross the bus."""
MAX_CAUSES = 10
_CALL_ERRORS: dict[str, type[CallError]] = {cls.code: cls for cls in CallError.__subclasses__()}


def to_failure(
    error: BaseException, *, origin: str, job: str | None = None, attempt: int = 0, server: str | None = None
) -> Failure:
    """Describe an error for the other side; never raises, whatever ``str(error)`` does."""
    return Failure(
        job=job,
        attempt=attempt,
        server=server,
        code=_code(error),
        message=_text(error),
        retryable=isinstance(error, EnvbusError) and error.retryable is True,
        origin=origin,
        causes=_causes(error),
    )


def from_failure(failure: Failure) -> CallError:
    """Return the error that a Failure describes, as the type with its code, else RemoteError."""
    cls = _CALL_ERRORS.get(failure.code, RemoteError)
    message = _bounded(failure.message)
    causes = tuple((_bounded(kind), _bounded(text)) for kind, text in failure.causes[:MAX_CAUSES])
    if cls is RemoteError and causes:
        message = f"{causes[0][0]}: {message}"
    return cls(
        message,
        origin=_bounded(failure.origin or failure.server or "server"),
        causes=causes,
        retryable=failure.retryable,
    )


def _code(error: BaseException) -> str:
    # An environment's own subclass may hold anything under that name, such as an HTTP status.
    code: object = error.code if isinstance(error, EnvbusError) else None
    return code if isinstance(code, str) else RemoteError.code


def _causes(error: BaseException) -> list[tuple[str, str]]:
    chain: list[tuple[str, str]] = []
    current: BaseException | None = error
    while current is not None and len(chain) < MAX_CAUSES:
        chain.append((type(current).__name__, _text(current)))
        current = current.__cause__
    return chain


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - foreign code; the type name is all that is left
        text = "unprintable error"
    return _bounded(text)


def _bounded(text: str) -> str:
    text = text[: MAX_TEXT + 1].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
