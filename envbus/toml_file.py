"""TOML files that people write: what is wrong in them is told with file, line and key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from envbus.errors import UsageError

Place = Sequence[str | int]
_NO_PART_OF_A_PLACE = ("function-after", "[key]")
"""What pydantic puts between the keys."""


@dataclass(frozen=True, slots=True)
class TomlFile:
    """A file as it was read."""

    path: Path
    text: str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path, what: str) -> Self:
        """Read a file.

        Args:
            what: What it is to the user, e.g. ``fleet file``.

        Raises:
            UsageError: It cannot be read, or is not TOML.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, text, tomllib.loads(text))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{path}: not TOML: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the {what} {path}: {error}") from error

    def place(self, where: Place) -> str:
        """Say where a key is, as errors begin: file, line and key."""
        line = line_of(self.text, where)
        return f"{self.path}:{line}: {key_of(where)}" if line else f"{self.path}: {key_of(where)}"


def usage_error(error: ValidationError, file: TomlFile | None = None) -> UsageError:
    """Return what to raise for values that do not fit: each problem on a line of its own."""
    return UsageError("\n    ".join(problems(error, file)))


def problems(error: ValidationError, file: TomlFile | None = None) -> Iterator[str]:
    """Tell each problem; without a file by its key only."""
    for detail in error.errors(include_url=False, include_input=False):
        said = message(detail)
        where = [part for part in detail["loc"] if part not in _NO_PART_OF_A_PLACE] or _named_at_the_start(said)
        place = key_of(where) if file is None else file.place(where)
        yield place + said.removeprefix(key_of(where))


def message(detail: Mapping[str, Any]) -> str:
    """Return what to say of one of pydantic's errors."""
    if detail["type"] == "extra_forbidden":
        return "unknown key"
    if detail["type"] == "missing":
        return "is missing"
    return str(detail["msg"]).removeprefix("Value error, ")


def key_of(where: Place) -> str:
    """Return a key as errors name it, e.g. ``env[0].replicas: ``; nothing for the whole file."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return f"{key.removeprefix('.')}: " if key else ""


def line_of(text: str, where: Place) -> int | None:
    """Return the line that a key begins on; where it is not found, that of what it would be in."""
    best: tuple[int, int] | None = None
    table: list[str | int] = []
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        key = re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if header:
            if header[1] == "[[":
                counts[header[2]] = counts.get(header[2], -1) + 1
            table = _table(_names(header[2]), counts)
        path = [*table, *_names(key[1])] if key else table if header else []
        if path and path == list(where[: len(path)]) and (best is None or len(path) > best[0]):
            best = len(path), number
    return best[1] if best else None


def _table(names: Sequence[str], counts: Mapping[str, int]) -> list[str | int]:
    """The place of a table: in the last entry of each list of tables that it is in."""
    place: list[str | int] = []
    for depth, name in enumerate(names, start=1):
        place.append(name)
        if (entry := counts.get(".".join(names[:depth]))) is not None:
            place.append(entry)
    return place


def _names(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def _named_at_the_start(said: str) -> list[str]:
    """The key that a check of the whole file has named itself, as in ``user.alice.calls: …``."""
    found = re.match(r"([\w-]+(?:\.[\w-]+)*): ", said)
    return found[1].split(".") if found else []
