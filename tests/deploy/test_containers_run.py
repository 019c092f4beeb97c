"""The containers of deploy/ run here, without an engine: their commands, users, files, health checks and signals."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

from artefacts import needed
from container_stage import Container, Image, container_stage
from deploy_site import (
    VARIABLES_OF_IMAGE,
    Site,
    compose_container,
    entrypoint,
    health_of,
    in_flight,
    kubernetes_container,
    metrics_of,
    probes_of,
    until,
    until_healthy,
)
from prometheus_client.parser import text_string_to_metric_families
from promql import LABELS, series_of, served_metrics
from readme_steps import README

UID = 12345
EVAL = re.compile(
    r"^ENVBUS_CONTEXT=access/contexts/alice.json (vf-eval .* -b http://host.docker.internal:8000/v1)$", re.M
)


def page_while_all_run(server: Container, trainer: Container, *, metrics_port: int) -> str:
    """The server's page of metrics once all rollouts of the README's eval run."""
    until(lambda: in_flight(metrics_of(server, metrics_port)) == 15, about=trainer)
    return metrics_of(server, metrics_port)


def drains(server: Container, trainer: Container, model: Container, *, says: str) -> None:
    """SIGTERM, while the model keeps rollouts waiting, lets them end with their rewards; then the container, with 0."""
    server.terminate()
    until(lambda: says in server.log, about=server)
    model.first.send_signal(signal.SIGCONT)
    assert trainer.wait(60) == 0, trainer.log
    assert "0 of 15 failed" in trainer.log
    assert server.wait(60) == 0, server.log


def assert_is_what_the_rules_ask_for(page: str) -> None:
    """The names that rules, dashboard and scalers are checked against are those of a real page."""
    promtool = needed("promtool", package="Debian's package prometheus")
    checked = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=30)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert series_of(page) == served_metrics()
    families = text_string_to_metric_families(page)
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert labels == LABELS - {"instance", "job", "type"}, "type is there once a rollout has failed"


def test_compose_from_the_readme_to_the_drain(tmp_path: Path) -> None:
    with container_stage(tmp_path, hosts=["nats", "controller", "dashboard", "host.docker.internal"]) as stage:
        site = Site(stage, tmp_path, kind="compose", user=UID)
        fleet = site.deploy / "compose/fleet.toml"
        one, more, _ = fleet.read_text().partition('\n[[env]]\nid = "guess-number"')
        assert more
        fleet.write_text(one.replace("replicas = 2\n", ""))  # one server is enough here
        site.own(UID, UID, 0o600)
        nats, model = compose_container(site, "nats"), site.model()
        until_healthy(nats, health_of(site, "nats"))
        controller, dashboard = compose_container(site, "controller"), compose_container(site, "dashboard")
        until_healthy(controller, health_of(site, "controller"))
        until_healthy(dashboard, health_of(site, "dashboard"))
        (command,) = EVAL.findall(README)
        model.first.send_signal(signal.SIGSTOP)
        trainer = site.trainer(*shlex.split(command))
        assert_is_what_the_rules_ask_for(page_while_all_run(controller, trainer, metrics_port=9465))
        drains(controller, trainer, model, says="stopping 1 servers")
        dashboard.terminate()
        assert dashboard.wait(20) == 0, dashboard.log


def test_a_pod_from_its_probes_to_the_drain(tmp_path: Path) -> None:
    with container_stage(tmp_path, hosts=["nats.envbus.svc", "model.models.svc"]) as stage:
        site = Site(stage, tmp_path, kind="kubernetes", user=UID)
        site.own(0, 10001, 0o440)
        nats, model = kubernetes_container(site, "nats"), site.model()
        server = kubernetes_container(site, "base")
        for manifests, container in (("nats", nats), ("base", server)):
            for command in probes_of(manifests):
                until_healthy(container, command)
        site.own(UID, UID, 0o600)  # for the trainer
        (command,) = EVAL.findall(README)
        model.first.send_signal(signal.SIGSTOP)
        command = command.replace("host.docker.internal", "model.models.svc")
        trainer = site.trainer(*shlex.split(command))
        page_while_all_run(server, trainer, metrics_port=9464)
        drains(server, trainer, model, says="is draining")


def test_a_signal_before_there_is_a_handler_ends_it_nevertheless(tmp_path: Path) -> None:
    """As process 1 a program that has set none, as Python while it starts, would not see it."""
    with container_stage(tmp_path, hosts=["nats"]) as stage:
        server = stage.run(Image(UID, {}, tmpfs=["/tmp"]), [*entrypoint()[:-1], "sleep", "60"])
        until(lambda: server.first.name() != "tini" or server.first.children(), about=server)
        server.terminate()
        assert server.wait(20) == 143


def test_a_container_with_a_wrong_flag_ends_at_once_and_says_why(tmp_path: Path) -> None:
    with container_stage(tmp_path, hosts=["nats"]) as stage:
        server = stage.run(
            Image(UID, VARIABLES_OF_IMAGE, tmpfs=["/tmp"]),
            [*entrypoint(), "serve", "reverse-text", "--metrics-prt=9464"],
        )
        assert server.wait(30) == 2
        assert "error[usage]" in server.log
