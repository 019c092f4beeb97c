"""Reads the documentation: fenced blocks by language and mark, and table rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "docs/environments.md", "docs/evaluation.md", "docs/architecture.md")
_FENCE = re.compile(r"^```(?P<language>\w*)(?: (?P<mark>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; its mark is the second word behind the fence."""

    page: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return a page's blocks in order."""
    text = read(page)
    found = [
        Block(page, text.count("\n", 0, match.start()) + 2, match["language"], match["mark"] or "", match["text"])
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if language is None or block.language == language]


def marked(page: str, mark: str) -> Block:
    """Return the one block with a mark."""
    (block,) = [block for block in blocks(page) if block.mark == mark]
    return block


def rows(page: str) -> list[list[str]]:
    """Return the cells of every table row of a page, heads and rules too."""
    return [_cells(line) for line in read(page).splitlines() if line.startswith("| ")]


def table(page: str, head: str) -> list[list[str]]:
    """Return the rows of the table whose head starts with a cell."""
    lines = read(page).partition(f"\n| {head} |")[2].splitlines()[2:]
    return [_cells(line) for line in takewhile(lambda line: line.startswith("| "), lines)]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
