"""Reads log files of JSON lines: all of them, those about one job, and how often something happened."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LogFile:
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    def lines(self, text: str = "") -> list[Line]:
        """The lines whose message begins so."""
        found = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in found if line["message"].startswith(text)]


def story(files: Iterable[LogFile], job: str) -> list[Line]:
    """What ``grep`` by a job's id over all files gives, in the order of time."""
    found = (json.loads(line) for file in files for line in file.text.splitlines() if job in line)
    return sorted(found, key=lambda line: str(line["time"]))


def happened(lines: Iterable[Line]) -> int:
    """How often, of lines of one kind: the first, and sums with their counts."""
    return sum(int(line.get("count", 1)) for line in lines)
