"""deploy/prometheus: valid for Prometheus, about metrics that a fleet really serves, alarms that go off; and each way
of breaking it that people find is seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from artefacts import DEPLOY, ROOT, assert_told, broken_copy, complaint, needed
from promql import LABELS, labels_in, metrics_in, served_metrics

FOLDER = DEPLOY / "prometheus"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def promtool() -> str:
    return needed("promtool", package="Debian's package prometheus")


def rules_of(folder: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Records or alarms by name."""
    groups = yaml.safe_load((folder / "rules.yml").read_text(encoding="utf-8"))["groups"]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}


def problems(folder: Path, promtool: str) -> Iterator[str]:
    """What is wrong with a folder like deploy/prometheus."""
    if wrong := complaint([promtool, "check", "config", "prometheus.yml"], folder=folder):
        yield wrong
    yield from unscraped(yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8")))
    records, alarms = rules_of(folder, "record"), rules_of(folder, "alert")
    for name, rule in (records | alarms).items():
        if unknown := metrics_in(rule["expr"]) - served_metrics() - set(records) - {"up"}:
            yield f"{name}: nobody has the metrics {unknown}"
        if unknown := labels_in(rule["expr"]) - LABELS:
            yield f"{name}: no metric has the labels {unknown}"
    for name, rule in alarms.items():
        if not rule.get("annotations", {}).get("summary") or rule.get("labels", {}).get("severity") is None:
            yield f"{name} lacks a summary or a severity"
    if wrong := complaint([promtool, "test", "rules", "rules_test.yml"], folder=folder):
        yield wrong


def unscraped(config: dict[str, Any]) -> Iterator[str]:
    """Prometheus takes port 80 where none is said, and is content without any rules."""
    port = re.search(r"^metrics_port = (\d+)", OPERATIONS, re.MULTILINE)
    assert port is not None
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for target in [target for part in jobs["envbus"]["static_configs"] for target in part["targets"]]:
        if not target.endswith(f":{port[1]}"):
            yield f"{target} is not on the port of the fleet file in docs/operations.md, {port[1]}"
    if config.get("rule_files") != ["rules.yml"]:
        yield "rules.yml is not loaded"


def test_the_configuration_and_its_rules_hold(promtool: str) -> None:
    assert list(problems(FOLDER, promtool)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "seen"),
    [
        ("prometheus.yml", "rule_files:", "rules_files:", "rules_files not found"),
        ("prometheus.yml", "static_configs:", "static_config:", "static_config not found"),
        ("prometheus.yml", "  - rules.yml", "  - rule.yml", "rule.yml"),
        ("prometheus.yml", "scrape_interval: 15s", "scrape_interval: 15", "duration"),
        ("prometheus.yml", 'controller:9465"', 'controller"', "not on the port"),
        ("prometheus.yml", 'controller:9465"', 'http://controller:9465"', "not a valid hostname"),
        ("rules.yml", "        for: 15m", "        fro: 15m", "fro not found"),
        ("rules.yml", "for: 15m", "for: 15 minutes", "duration"),
        ("rules.yml", "(envbus_server_slots)", "(envbus_server_slot)", "envbus_server_slot'"),
        ("rules.yml", "envbus_server_jobs_retried_total", "envbsu_server_jobs_retried_total", "envbsu_server_jobs"),
        ("rules.yml", "envbus_server_jobs_retried_total", "envbus_server_jobs_retried", "nobody has the metrics"),
        ("rules.yml", "expr: env:envbus_server_waiting_jobs:max", "expr: env:envbus_server_waiting:max", "nobody has"),
        ("rules.yml", "max by (env, controller, place)", "max by (env, controller, slot)", "no metric has the labels"),
        ("rules.yml", 'outcome="failed"', 'outcmoe="failed"', "no metric has the labels"),
        ("rules.yml", 'outcome="failed"', 'outcome="fail"', "FAILED"),
        ("rules.yml", "absent(envbus_server_info)", "absent(envbus_server_info", "parse error"),
        ("rules.yml", "max by (env, server) (envbus_server_slots)", "envbus_server_slots", "FAILED"),
        ("rules.yml", "labels: { severity: critical }", "labels: { sevrity: critical }", "lacks a summary"),
        ("rules.yml", "{{ $labels.env }} cannot", "{{ $label.env }} cannot", "undefined variable"),
    ],
)
def test_breaking_it_is_seen(promtool: str, tmp_path: Path, file: str, old: str, new: str, seen: str) -> None:
    assert_told(problems(broken_copy(FOLDER, tmp_path, file, old, new), promtool), seen)


def test_every_alarm_and_record_is_tested() -> None:
    """An alarm by a case in which it goes off; and docs/operations.md says what it means."""
    groups = yaml.safe_load((FOLDER / "rules_test.yml").read_text(encoding="utf-8"))["tests"]
    gone_off = {
        case["alertname"] for group in groups for case in group.get("alert_rule_test", ()) if case["exp_alerts"]
    }
    asked = {case["expr"] for group in groups for case in group.get("promql_expr_test", ())}
    assert gone_off == set(rules_of(FOLDER, "alert"))
    assert set().union(*map(metrics_in, asked)) == set(rules_of(FOLDER, "record"))
    section = OPERATIONS.partition("\n## Alarms\n")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert told == list(rules_of(FOLDER, "alert"))
