"""Containers of deploy/ on a stage: what the compose file and the manifests say, with what the README has one make."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from artefacts import DEPLOY, needed
from compose_checks import VARIABLES, Compose, environment_of, interpolated
from container_stage import Container, ContainerStage, Image
from dockerfile_checks import environment_of as image_environment
from dockerfile_checks import exec_form, stages_of
from kubernetes_checks import Cluster
from kubernetes_stage import build, secrets_in
from pod_checks import pod_of
from readme_steps import README, make_access
from strict_yaml import read

from envbus.bus.embedded import find_nats_server

DOCKERFILE = stages_of((DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8"))[-1]
VARIABLES_OF_IMAGE = {name: value for name, value in image_environment(DOCKERFILE).items() if name != "PATH"}
DEADLINE_S = 120.0
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"


def entrypoint() -> list[str]:
    """The image's, once its first program is known to be here."""
    needed("tini", package="Debian's package tini")
    return exec_form(DOCKERFILE.last("ENTRYPOINT"))


def until(holds: Callable[[], object], *, about: Container, pause_s: float = 0.2) -> None:
    """Wait for something that a container does."""
    deadline = time.monotonic() + DEADLINE_S
    while not about.has_ended() and not holds():
        assert time.monotonic() < deadline, about.log
        time.sleep(pause_s)
    assert not about.has_ended(), about.log


def metrics_of(container: Container, port: int) -> str:
    """The container's page of metrics."""
    return container.execute("python", "-c", FETCH, f"http://127.0.0.1:{port}/metrics").stdout


def in_flight(page: str) -> float:
    """How many rollouts run, as a page of metrics has it."""
    return sum(float(value) for value in re.findall(r"^envbus_server_in_flight\{.*\} (\S+)$", page, re.MULTILINE))


def until_healthy(container: Container, command: list[str]) -> None:
    """Run a health check as an engine does, from when the container has said something until it passes."""
    until(lambda: container.log, about=container)
    until(lambda: container.execute(*command).returncode == 0, about=container, pause_s=1)  # each takes CPU


class Site:
    """What both ways of running share: the steps of the README, a model, trainers."""

    def __init__(self, stage: ContainerStage, folder: Path, *, kind: str, user: int) -> None:
        self.stage = stage
        self.user = user
        self.deploy = folder / "deploy"
        for part in ("compose.yaml", "compose", "prometheus", "kubernetes"):
            source = DEPLOY / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, _made(self.deploy) / part)
        self.access = make_access(kind, self.deploy)
        self.volumes = _made(folder / "volumes")

    def own(self, user: int, group: int, mode: int) -> None:
        """Give the secrets the owner and mode that they have in containers."""
        for path in (self.access, *self.access.rglob("*")):
            os.chown(path, user, group)
            path.chmod(mode if path.is_file() else 0o750)

    def model(self) -> Container:
        """A model on port 8000."""
        image = Image(self.user, VARIABLES_OF_IMAGE, tmpfs=["/tmp"])
        command = ["python", "-m", "envbus.demo_model", "--host", "0.0.0.0", "--port", "8000"]
        model = self.stage.run(image, command)
        until(lambda: "http://" in model.log, about=model)
        return model

    def trainer(self, *command: str) -> Container:
        """Run a command with the context of alice."""
        environment = {**VARIABLES_OF_IMAGE, "ENVBUS_CONTEXT": "/access/contexts/alice.json", "COLUMNS": "120"}
        files = {self.stage.hosts: "/etc/hosts"}
        image = Image(
            self.user, environment, files=files, folders={self.access: "/access"}, tmpfs=["/tmp"], folder="/tmp"
        )
        return self.stage.run(image, command)


def compose_container(site: Site, name: str) -> Container:
    """Start a service of the compose file."""
    file = site.deploy / "compose.yaml"
    compose = Compose(read(interpolated(file.read_text(encoding="utf-8"), VARIABLES)), file.parent)
    service = compose.services[name]
    files = {here: there for there, here in compose.files_of(name).items()} | {site.stage.hosts: "/etc/hosts"}
    own = service["image"].startswith("envbus:")
    volumes = [each.split(":") for each in service.get("volumes", [])]
    image = Image(
        site.user,
        (VARIABLES_OF_IMAGE if own else {}) | environment_of(service),
        files=files,
        folders={_made(site.volumes / name, mode=0o777): there for name, there in volumes},
        tmpfs=[each.split(":")[0] for each in service.get("tmpfs", [])],
    )
    return site.stage.run(image, [*(entrypoint() if own else [find_nats_server()]), *service["command"]])


def health_of(site: Site, name: str) -> list[str]:
    """The command of a service's health check."""
    document = read(interpolated((site.deploy / "compose.yaml").read_text(encoding="utf-8"), VARIABLES))
    return list(document["services"][name]["healthcheck"]["test"][1:])


def kubernetes_container(site: Site, manifests: str) -> Container:
    """Start the one workload of a kustomization."""
    cluster = Cluster(build(manifests), {})
    (workload,) = cluster.workloads
    pod = pod_of(workload)
    (container,) = pod["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    files = {site.stage.hosts: "/etc/hosts"}
    for volume in [each for each in pod["volumes"] if "secret" in each]:
        made = secrets_in(README)[volume["secret"]["secretName"]]
        for item in volume["secret"]["items"]:
            files[site.deploy / made[item["key"]]] = f"{mounts[volume['name']]}/{item['path']}"
    own = container["image"].startswith("envbus:")
    image = Image(
        pod["securityContext"]["runAsUser"],
        (VARIABLES_OF_IMAGE if own else {}) | cluster.variables_of(container),
        files=files,
        tmpfs=[mounts[each["name"]] for each in pod["volumes"] if "emptyDir" in each],
    )
    return site.stage.run(image, [*(entrypoint() if own else [find_nats_server()]), *cluster.arguments_of(container)])


def probes_of(manifests: str) -> list[list[str]]:
    """The probes of the one workload as commands; those over HTTP as ``envbus health`` would ask; each once."""
    (workload,) = [each for each in build(manifests) if each["kind"] in ("Deployment", "StatefulSet")]
    (container,) = pod_of(workload)["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    commands: list[list[str]] = []
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        if (asked := container[kind].get("httpGet")) is not None:
            command = ["envbus", "health", f"http://127.0.0.1:{ports[asked['port']]}{asked['path']}"]
        else:
            command = container[kind]["exec"]["command"]
        commands += [] if command in commands else [command]
    return commands


def _made(folder: Path, *, mode: int = 0o755) -> Path:
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    return folder
