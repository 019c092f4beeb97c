"""deploy/compose.yaml: valid, true to the files that it names and to envbus, and each way of breaking it is seen."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from artefacts import DEPLOY, complaint
from compose_checks import compose_problems
from readme_steps import make_access

PARTS = ("compose.yaml", "compose", "docker", "prometheus")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """deploy/ as it is after the README's steps."""
    folder = tmp_path_factory.mktemp("repository") / "deploy"
    folder.mkdir()
    for part in PARTS:
        (shutil.copytree if (DEPLOY / part).is_dir() else shutil.copy)(DEPLOY / part, folder / part)
    make_access("compose", folder)
    return folder


def test_nothing_is_wrong_with_it(ready: Path) -> None:
    assert compose_problems(ready / "compose.yaml") == []


def test_the_schema_has_nothing_against_it() -> None:
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    assert complaint([*checker, DEPLOY / "compose.yaml"]) is None


def test_without_the_steps_before_it_is_said_what_is_missing(ready: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(ready, tmp_path / "deploy", ignore=shutil.ignore_patterns("access"))
    assert "secrets.controller-seed: there is no file ./access/users/controller.nk" in compose_problems(
        copy / "compose.yaml"
    )


COMPOSE, FLEET, ACCESS = "compose.yaml", "compose/fleet.toml", "compose/access.toml"
MISTAKES = [
    # misspelled
    (COMPOSE, "    depends_on:\n", "    depend_on:\n", "depend_on"),
    (COMPOSE, "healthcheck:\n", "health_check:\n", "health_check"),
    (COMPOSE, "read_only: true", "readonly: true", "readonly"),
    (COMPOSE, "condition: service_healthy", "condition: healthy", "depends_on"),
    (COMPOSE, "stop_grace_period", "stop_grace_time", "stop_grace_time"),
    (COMPOSE, "    mem_limit: 8g\n", "    mem_limit: 8g\n    mem_limit: 4g\n", "is there twice"),
    (COMPOSE, "ENVBUS_UID:?set", "ENVBUS_USER:?set", "ENVBUS_USER is not set"),
    (COMPOSE, "services:\n  nats:", "services:\n nats:", "expected"),
    # pointing nowhere
    (
        COMPOSE,
        "      nats: { condition: service_healthy }\n",
        "      nat: { condition: service_healthy }\n",
        "'nat', which is no service",
    ),
    (COMPOSE, "networks: [bus, watch]", "networks: [bus, metrics]", "networks has no 'metrics'"),
    (COMPOSE, "networks: [bus, watch]", "networks: [bus]", "controller is on no network of it"),
    (COMPOSE, '"logs:/var', '"log:/var', "volumes has no 'log'"),
    (COMPOSE, "source: controller-seed,", "source: controller-nkey,", "secrets has no 'controller-nkey'"),
    (
        COMPOSE,
        "users/controller.nk }\n  server-context",
        "users/ctl.nk }\n  server-context",
        "no file ./access/users/ctl.nk",
    ),
    (
        COMPOSE,
        "source: fleet, target: /etc/envbus/fleet.toml",
        "source: fleet, target: /etc/fleet.toml",
        "fleet.toml is not mounted",
    ),
    (COMPOSE, "target: /etc/envbus/users/server.nk", "target: /etc/envbus/server.nk", "where server.nk is not mounted"),
    (COMPOSE, "source: dashboard-seed,", "source: server-seed,", "where dashboard.nk is not mounted"),
    (COMPOSE, "dockerfile: deploy/docker/Dockerfile", "dockerfile: Dockerfile", "there is no Dockerfile"),
    (COMPOSE, "target: /etc/prometheus/rules.yml", "target: /etc/prometheus/alarms.yml", "rules.yml is not mounted"),
    (
        COMPOSE,
        "ENVBUS_CONTEXT: /etc/envbus/contexts/dashboard.json",
        "ENVBUS_CONTEX: /etc/dashboard.json",
        "no context to connect with",
    ),
    (FLEET, "contexts/controller.json", "contexts/ctl.json", "contexts/ctl.json is not mounted"),
    (
        ACCESS,
        'controllers = ["controller"]',
        'controllers = ["ctl"]',
        "there is no file ./access/contexts/controller.json",
    ),
    # ports
    (COMPOSE, ':8017:8017"', ':8017:8080"', "port 8080 is published"),
    (COMPOSE, '"127.0.0.1:8017:8017"', '"8017:8017"', "published to other hosts"),
    (COMPOSE, '"--port", "8017"', '"--port", "8018"', "it listens on 8018"),
    (COMPOSE, "127.0.0.1:9465/readyz", "127.0.0.1:9464/readyz", "asks port 9464"),
    (COMPOSE, "9465/readyz", "9465/ready", "no health page"),
    (FLEET, "metrics_port = 9465\n", "", "health pages are on port None"),
    (FLEET, "metrics_port = 9465", "metrics_port = 9466", "nobody serves metrics at controller:9465"),
    # commands and times
    (COMPOSE, '["up", ', '["run", ', "no command 'run'"),
    (COMPOSE, '"--host", "0.0.0.0"', '"--bind", "0.0.0.0"', "No such option"),
    (COMPOSE, "stop_grace_period: 300s", "stop_grace_period: 30s", "a stop may take 245 s"),
    (COMPOSE, "    stop_grace_period: 300s\n", "", "stop_grace_period is 10 s"),
    (FLEET, "grace = 120 ", "grace = 1200 ", "a stop may take 1325 s"),
    (FLEET, "max_concurrent = 64", "max_concurent = 64", "unknown key"),
    # containment
    (COMPOSE, "  cap_drop: [ALL]\n", "", "keeps capabilities"),
    (COMPOSE, '  security_opt: ["no-new-privileges:true"]\n', "", "may gain privileges"),
    (COMPOSE, "deploy/docker/Dockerfile\n  user: *owner\n", "deploy/docker/Dockerfile\n", "runs as root"),
    (COMPOSE, "image: nats:2.15-alpine", "image: nats:latest", "has no version"),
    (
        COMPOSE,
        '"logs:/var/log/envbus"',
        '"logs:/var/log/envbus", "/var/run/docker.sock:/var/run/docker.sock"',
        "the engine's socket",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "seen"), MISTAKES)
def test_a_mistake_is_seen(file: str, old: str, new: str, seen: str, ready: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(ready, tmp_path / "deploy")
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text, f"{file} has no {old!r}"
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    if file == ACCESS:
        shutil.rmtree(copy / "access/contexts")
        make_access("compose", copy)
    found = compose_problems(copy / "compose.yaml")
    assert any(seen in problem for problem in found), found
