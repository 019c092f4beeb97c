"""How a command's failure looks: one line on stderr, and the exit code of each kind of error."""

from __future__ import annotations

import sys
import traceback

from pydantic import ValidationError

from envbus.errors import (
    BusClosedError,
    BusError,
    EnvbusError,
    EnvironmentCrashedError,
    EnvironmentLoadError,
    NoServerError,
    ServerLoadingError,
    UsageError,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_USAGE_KINDS = (UsageError, EnvironmentLoadError, BusError, NoServerError, ServerLoadingError)


def exit_code(error: BaseException) -> int:
    """The exit code for an error."""
    if isinstance(error, _USAGE_KINDS) and not isinstance(error, BusClosedError):
        return EXIT_USAGE
    return EXIT_FAILED


def report(error: BaseException, *, verbose: bool) -> int:
    """Print an error; the exit code for it. Its traceback only if asked for, or if it is a bug of ours."""
    if isinstance(error, ValidationError):
        error = _as_usage_error(error)
    if verbose or not isinstance(error, EnvbusError):
        # What the environment's own code raised; how we got there says nothing to its author.
        foreign = error.__cause__ if isinstance(error, EnvironmentCrashedError) else None
        traceback.print_exception(foreign or error, file=sys.stderr)
    code = error.code if isinstance(error, EnvbusError) else type(error).__name__
    print_error(str(error) or type(error).__name__, code=code)
    return exit_code(error)


def _as_usage_error(error: ValidationError) -> UsageError:
    """A setting that is out of its range, without its value: it may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    usage_error = UsageError(f"{error.title} {name}: {message}" if name else message)
    usage_error.__cause__ = error
    return usage_error


def print_error(message: str, *, code: str) -> None:
    """Print ``error[code]: message``; a quoted log below the message keeps its lines.

    The sidecar of another process reads the code from this line.
    """
    first, *quoted = message.splitlines() or [""]
    if quoted and not all(line.startswith("    ") for line in quoted):
        first, quoted = " ".join(message.split()), []
    sys.stdout.flush()
    print("\n".join([f"error[{code}]: {first}", *quoted]), file=sys.stderr, flush=True)
