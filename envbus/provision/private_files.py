"""Writes files whole or not at all, secrets readable by their owner only from the first byte."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PRIVATE = 0o600
PUBLIC = 0o644


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner enters; one that is there keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_private(file: Path, text: str) -> None:
    """Write a secret."""
    _write(file, text, PRIVATE)


def write_public(file: Path, text: str) -> None:
    """Write what everybody may read."""
    _write(file, text, PUBLIC)


def _write(file: Path, text: str, mode: int) -> None:
    beside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(beside, mode)  # whatever the umask is
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
