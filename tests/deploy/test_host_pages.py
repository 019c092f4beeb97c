"""The pages beside units, batch script, rules and dashboard: their commands, variables and links are real."""

from __future__ import annotations

import re
import shlex

import pytest
from artefacts import DEPLOY
from envbus_commands import parsed

PAGES = ("grafana", "prometheus", "slurm", "systemd")


def text_of(page: str) -> str:
    return (DEPLOY / page / "README.md").read_text(encoding="utf-8")


def commands(text: str) -> list[str]:
    """Every command of envbus: in shell blocks, and in `code`."""
    shell = "\n".join(re.findall(r"^```sh.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)).splitlines()
    inline = re.findall(r"`(envbus [a-z]+ [^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line for line in [*shell, *inline] if line.startswith(("envbus ", "vf-eval "))]


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_are_ones_that_envbus_takes(page: str) -> None:
    for line in commands(text_of(page).replace("\n  ", " ")):
        program, *arguments = shlex.split(line, comments=True)
        parsed(arguments if program == "envbus" else ["eval", *arguments])


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text_of(page))
    assert links
    assert [link for link in links if not (DEPLOY / page / link).exists()] == []


def test_the_batch_scripts_variables_are_told() -> None:
    script = (DEPLOY / "slurm" / "fleet.sbatch").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(ENVBUS_SLURM_\w+)` \|", text_of("slurm"), re.MULTILINE)
    assert set(told) == set(re.findall(r"ENVBUS_SLURM_\w+", script))


def test_every_file_of_the_units_is_told() -> None:
    """What lies there without a word is used by nobody."""
    text = text_of("systemd")
    files = [file for file in (DEPLOY / "systemd").rglob("*") if file.is_file() and file.suffix != ".md"]
    assert [file.name for file in files if file.name not in text and file.stem.rstrip("@") not in text] == []
