"""What is wrong with the Dockerfile that its linter does not know: this project's own files, commands and users."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artefacts import ROOT
from envbus_commands import health_problems, parsed

from envbus.errors import UsageError

_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|SEED", re.IGNORECASE)


@dataclass(slots=True)
class Stage:
    """One FROM and what follows; of each instruction all its texts, in order."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [text for instruction, text in self.instructions if instruction == name]

    def last(self, name: str) -> str:
        return (self.all(name) or [""])[-1]


def stages_of(text: str) -> list[Stage]:
    """Read a Dockerfile."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    stages: list[Stage] = []
    for line in lines.replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stages.append(Stage(rest))
        elif name:
            stages[-1].instructions.append((name, " ".join(rest.split())))
    return stages


def exec_form(text: str) -> list[str]:
    """The words of ENTRYPOINT, CMD or HEALTHCHECK; none if it is in shell form."""
    found = re.search(r"\[.*\]$", text)
    return list(json.loads(found[0])) if found else []


def environment_of(stage: Stage) -> dict[str, str]:
    """What ENV sets."""
    pairs = [pair.split("=", 1) for text in stage.all("ENV") for pair in text.split()]
    return dict(pair for pair in pairs if len(pair) == 2)


def dockerfile_problems(dockerfile: Path, *, user: str) -> Iterator[str]:
    """What is wrong.

    Args:
        user: That which the Kubernetes manifests run it as.
    """
    stages = stages_of(dockerfile.read_text(encoding="utf-8"))
    final = stages[-1]
    for stage in stages:
        image, _, tag = stage.base.split()[0].partition(":")
        if not tag or tag == "latest":
            yield f"base {image} has no version"
        for text in stage.all("ENV") + stage.all("ARG"):
            if _SECRET.search(text.partition("=")[0]):
                yield f"{text} would put a secret into a layer"
    if final.last("USER") != f"{user}:{user}":
        yield f"runs as {final.last('USER') or 'root'}, not as {user}"
    yield from _commands(final)
    yield from _copied(dockerfile, stages)


def _commands(final: Stage) -> Iterator[str]:
    entrypoint = exec_form(final.last("ENTRYPOINT"))
    if entrypoint != ["tini", "--", "envbus"]:
        yield f"the entrypoint {final.last('ENTRYPOINT')} passes no SIGTERM on to envbus"
    check = exec_form(final.last("HEALTHCHECK"))
    if not check:
        yield "has no health check in exec form"
    else:
        port = int(final.last("EXPOSE") or 0)
        yield from health_problems(check, port)
    try:
        if exec_form(final.last("CMD")) != ["--help"]:
            parsed(exec_form(final.last("CMD")))
    except UsageError as error:
        yield str(error)


def _copied(dockerfile: Path, stages: list[Stage]) -> Iterator[str]:
    """What is copied is there and let in, what the build needs is copied, and nothing else comes near."""
    sources = []
    for text in [text for stage in stages for text in stage.all("COPY")]:
        if not text.startswith("--from="):
            sources += text.split()[:-1]
    let_in = _let_in(dockerfile.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8"))
    for source in sources:
        if not (ROOT / source).exists():
            yield f"there is no {source} to copy"
        elif source not in let_in:
            yield f"{source} is copied, but the ignore file keeps it out"
    yield from (f"{each} is let in, but not copied" for each in sorted(let_in - set(sources)))
    yield from (f"the build needs {each}" for each in sorted(_needed() - set(sources)))


def _let_in(ignore: str) -> set[str]:
    """Entries of the repository's root that get into the build's context."""
    entries = {path.name for path in ROOT.iterdir()}
    kept: set[str] = set()
    for line in ignore.splitlines():
        if line.startswith("!"):
            kept |= set(fnmatch.filter(entries, line[1:]))
        elif line and not line.startswith("#"):
            kept -= set(fnmatch.filter(entries, line))
    return kept if "*" in ignore.splitlines() else entries


def _needed() -> set[str]:
    """What pyproject.toml names, and itself."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"], *packages}
