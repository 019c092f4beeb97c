"""deploy/README.md: its links lead somewhere, and every envbus command in it is one."""

from __future__ import annotations

import re
import shlex

import pytest
from artefacts import DEPLOY
from envbus_commands import parsed
from readme_steps import README

BLOCKS = re.findall(r"^```sh.*?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`((?:envbus|vf-eval) [a-z]+ [^`]*)`", README)


def commands() -> list[str]:
    """Command lines that begin with envbus or vf-eval, variables before them aside."""
    lines = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
    bare = [re.sub(r"^(?:[A-Z_]+=\S+ +)+", "", line) for line in lines]
    bare = [re.sub(r"^docker run .* envbus:\S+ ", "envbus ", line) for line in bare]
    return [line for line in [*bare, *INLINE] if re.match(r"(envbus|vf-eval) [a-z]+", line)]


def test_there_are_commands() -> None:
    assert len(commands()) > 10


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_a_command_is_one(line: str) -> None:
    """By the real command line."""
    program, *arguments = shlex.split(line, comments=True)
    if arguments[-1] == "--help":  # in place of what is missing
        arguments[-1] = "reverse-text"
    parsed(["eval", *arguments] if program == "vf-eval" else arguments)


def test_its_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        file, _, heading = target.partition("#")
        if target.startswith("http"):
            continue
        assert (DEPLOY / file).exists() if file else heading in headings, target
