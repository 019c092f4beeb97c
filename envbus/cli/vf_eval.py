"""The script ``vf-eval``: the same as ``envbus eval``.

Where the ``verifiers`` package (0.2 or later) is installed and nothing asks for the bus, its own vf-eval runs instead:
installing envbus takes nothing away. So it does, in any version, for ``envbus-remote``, an environment module for it.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

_OWN_FLAGS = ("--address", "--context", "--demo-model", "--workers", "--json", "--prefix")
_ADDRESS_VARIABLES = ("ENVBUS_URL", "NATS_URL", "ENVBUS_CONTEXT")
_SINCE = (0, 2)
_MADE_FOR_THEIRS = ("envbus-remote", "envbus_remote")


def main() -> int:
    """Run the command line of this process; the exit code."""
    theirs = their_vf_eval(sys.argv[1:])
    if theirs is not None:
        code = theirs()
        return code if isinstance(code, int) else 0
    import typer

    from envbus.cli.eval_command import evaluate
    from envbus.cli.main import run_app

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command("vf-eval")(evaluate)
    return run_app(app, sys.argv[1:], prog_name="vf-eval")


def their_vf_eval(argv: Sequence[str]) -> Callable[[], Any] | None:
    """The vf-eval of an installed verifiers package, if it shall run instead."""
    is_theirs = any(argument in _MADE_FOR_THEIRS for argument in argv)
    flags = {argument.partition("=")[0] for argument in argv}
    asks_for_bus = flags & set(_OWN_FLAGS) or any(os.environ.get(name) for name in _ADDRESS_VARIABLES)
    if asks_for_bus and not is_theirs:
        return None
    try:
        distribution = importlib.metadata.distribution("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return None
    if _release(distribution.version) < _SINCE and not is_theirs:
        return None
    for script in distribution.entry_points.select(group="console_scripts", name="vf-eval"):
        return script.load()  # type: ignore[no-any-return]
    return None


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
