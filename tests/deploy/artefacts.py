"""What tests of deploy/ share: where it is, a copy that is broken on purpose, and the programs that check it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"


def needed(program: str, *, package: str) -> str:
    """The path of a program. CI installs what tests need, so there its absence is a failure."""
    here = Path(sys.executable).parent  # programs of Python packages, also where the environment is not activated
    found = shutil.which(program, path=os.pathsep.join([str(here), os.environ.get("PATH", "")]))
    if found is None:
        reason = f"{program} is not installed ({package})"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def broken_copy(folder: Path, to: Path, file: str, old: str, new: str) -> Path:
    """A copy of a folder with one text replaced in one of its files."""
    copy = shutil.copytree(folder, to / folder.name)
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text, f"{file} has no {old!r}"
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    return copy


def complaint(command: Sequence[str | Path], *, folder: Path | None = None) -> str | None:
    """What a checking program has to say if it fails; None if it is content."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else f"exit code {done.returncode}: {done.stdout}{done.stderr}"


def assert_told(problems: Iterator[str], seen: str) -> None:
    """One of the problems says so; checks that come after it are not made."""
    told = []
    for problem in problems:
        if seen in problem:
            return
        told.append(problem)
    raise AssertionError(f"nothing says {seen!r}: {told}")
