"""Values of command-line options: JSON objects, headers, and the option whose value may be left out (pure)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envbus.errors import UsageError
from envbus.model_headers import check_headers

MAX_SECONDS = 10**8
"""Three years: the most that an option with a time takes."""
LATEST_RUN = ""
"""The value of ``--resume`` without a path."""


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The object in an option's value; empty without one.

    Raises:
        UsageError: It is not a JSON object.
    """
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option}: not JSON ({error}); write it like '{{\"key\": 1}}' in single quotes") from error
    if not isinstance(value, dict):
        raise UsageError(f"{option}: must be a JSON object like '{{\"key\": 1}}', not {text[:100]}")
    return value


def headers(lines: Sequence[str]) -> dict[str, str]:
    """HTTP headers from ``Name: Value`` texts.

    Raises:
        UsageError: One is no header, or may not be set; its value, often a secret, is not shown.
    """
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise UsageError("--header: write it as 'Name: Value'")
        found[name.strip()] = value.strip()
    try:
        check_headers(found.items())
    except ValueError as error:
        raise UsageError(f"--header {error}") from None
    return found


def with_resume_value(argv: Sequence[str]) -> list[str]:
    """The arguments with an explicit value for a ``-R`` or ``--resume`` that has none."""
    result: list[str] = []
    for position, argument in enumerate(argv):
        result.append(argument)
        if argument == "--":
            return [*result, *argv[position + 1 :]]
        following = argv[position + 1 : position + 2]
        if argument in ("-R", "--resume") and (not following or following[0].startswith("-")):
            result.append(LATEST_RUN)
    return result
