"""Server processes of the bundled reverse-text environment, which calls its model once; always reaped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envbus import NATSEnvClient
from envbus.bus.lifeline import kill_group

ENV_ID = "reverse-text"
READY_S = 40.0
ITEM: Any = {"prompt": [{"role": "user", "content": "abc"}], "example_id": 0, "answer": "cba"}


@contextlib.contextmanager
def serving(
    address: str,
    prefix: str,
    folder: Path,
    *,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    inside: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, behind a command that puts it elsewhere."""
    command = [sys.executable, "-P", "-m", "envbus", "serve", ENV_ID, "--address", address, "--prefix", prefix]
    with open(folder / f"{prefix}.log", "ab") as log:
        process = subprocess.Popen(
            [*inside, *command, *options],
            stdout=log,
            stderr=log,
            env=os.environ | dict(environ or {}),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_group(process.pid)
        process.wait(10)


def client_of(address: str, prefix: str) -> NATSEnvClient:
    return NATSEnvClient(address, ENV_ID, prefix=prefix)
