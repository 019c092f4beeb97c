"""deploy/README.md: its marked blocks, and its ``envbus nats`` steps, which are run as they stand."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

from artefacts import DEPLOY

from envbus.cli.main import app, run_app

README = (DEPLOY / "README.md").read_text(encoding="utf-8")


def block(mark: str) -> str:
    """The fenced block with a mark behind its language."""
    (text,) = re.findall(rf"^```\w+ {mark}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return str(text)


def make_access(mark: str, folder: Path) -> Path:
    """Run the steps of a block that make the folder ``access``, in a copy of deploy/."""
    steps = [line for line in block(mark).splitlines() if line.startswith("envbus nats ")]
    assert len(steps) == 2
    with contextlib.chdir(folder):
        for step in steps:
            assert run_app(app, shlex.split(step)[1:]) == 0, step
    return folder / "access"
