"""Why an episode failed, from the records that the library keeps, as the ErrorInfo of an output."""

from __future__ import annotations

import builtins
from typing import Any

from verifiers.v1 import errors as their_errors

from envbus.error_chain import MAX_CHAIN, MAX_REPR_CHARS, MAX_TRACEBACK_CHARS
from envbus.types import ErrorInfo

_CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
_RETRYABLE = frozenset({408, 409, 429})


def episode_error(episode: Any) -> ErrorInfo | None:
    """The error of an episode, or None where it ended well.

    An error of the environment's own code wins over those of its agents' runs.
    """
    if episode.ok:
        return None
    records = [*(trace.last_error for trace in episode.traces if not trace.ok), episode.last_error]
    record = next((each for each in reversed(records) if each is not None), None)
    if record is None:
        stops = [trace.stop_condition for trace in episode.traces if not trace.ok]
        return _info("RolloutError", [("RolloutError", f"the episode failed: {', '.join(map(str, stops))}")])
    chain = [(record.type, record.message), *_causes(record.traceback or "")]
    is_retryable = record.status_code is not None and (record.status_code >= 500 or record.status_code in _RETRYABLE)
    return _info(record.type, chain[:MAX_CHAIN], is_retryable=is_retryable, traceback=record.traceback or "")


def _info(name: str, chain: list[tuple[str, str]], *, is_retryable: bool = False, traceback: str = "") -> ErrorInfo:
    return ErrorInfo(
        error=name,
        error_chain_repr=" -> ".join(f"{kind}({message[:MAX_REPR_CHARS]!r})" for kind, message in chain),
        error_chain_str=" -> ".join(kind for kind, _ in chain),
        error_bases=_bases(name),
        retryable=is_retryable,
        traceback=traceback[-MAX_TRACEBACK_CHARS:],
    )


def _bases(name: str) -> list[str]:
    kind = getattr(their_errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return [name]
    return [base.__name__ for base in kind.__mro__ if base is not object]


def _causes(traceback: str) -> list[tuple[str, str]]:
    """Type and message of what the error came from, nearest first: a record has only the traceback's text."""
    last, *earlier = reversed(traceback.split(_CAUSED))
    causes = []
    for part in earlier:
        if _MEANWHILE in last:  # what is above is no cause of it
            break
        last = part
        if (said := _raised(part.split(_MEANWHILE)[-1])) is not None:
            causes.append(said)
    return causes


def _raised(part: str) -> tuple[str, str] | None:
    """The exception at the end of one traceback: its first line that is not indented, and what follows."""
    lines = part.strip("\n").split("\n")[1:]
    start = next((number for number, line in enumerate(lines) if line and not line[0].isspace()), None)
    if start is None:
        return None
    name, _, message = "\n".join(lines[start:]).partition(": ")
    return name.rpartition(".")[2], message
