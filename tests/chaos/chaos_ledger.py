"""Ledgers of a chaos run: files of JSON lines that several processes append to and that outlive all of them.

Times in them are those of the machine's monotonic clock: the same in all processes,
and no jump of the wall clock moves them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER_VAR = "ENVBUS_CHAOS_FOLDER"
"""Tells the processes of a run where its ledgers are; also marks them."""
ATTEMPTS, CALLS, PROCESSES, VITALS, ORDERS = "attempts", "calls", "processes", "vitals", "orders"


def write(folder: Path, ledger: str, **entry: Any) -> None:
    """Append one line in one write."""
    line = json.dumps({"pid": os.getpid(), "at": time.monotonic()} | entry).encode() + b"\n"
    fd = os.open(folder / f"{ledger}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def read(folder: Path, ledger: str) -> list[dict[str, Any]]:
    """Return the lines in the order of writing."""
    file = folder / f"{ledger}.jsonl"
    return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def run_folder() -> Path:
    """Where this process's run has its ledgers."""
    return Path(os.environ[FOLDER_VAR])
