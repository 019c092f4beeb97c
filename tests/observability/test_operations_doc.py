"""docs/operations.md against the code: its commands, fleet file, metrics, alarms and states are real."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
from test_metrics import page
from typer.main import get_command

from envbus.cli.main import app
from envbus.controller.fleet_views import ServerState
from envbus.controller.spec import read_fleet_file

TEXT = (Path(__file__).parent.parent.parent / "docs" / "operations.md").read_text(encoding="utf-8")
COMMANDS: Any = get_command(app)


def block(mark: str) -> str:
    """The fenced block with a mark."""
    found = re.search(rf"^```\w+ {re.escape(mark)}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def commands() -> list[str]:
    """Every command line of the page: in its shell blocks, and in `code`."""
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)).splitlines()
    inline = re.findall(r"`(envbus [a-z]+[^`]*)`", TEXT.replace("\n", " "))
    return [line for line in [*shell, *inline] if line.startswith("envbus ")]


def table(head: str) -> list[str]:
    """The first cells of a table."""
    body = TEXT.partition(f"\n| {head} |")[2].partition("\n\n")[0]
    return [line.split("|")[1].strip().strip("`") for line in body.splitlines()[2:]]


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_each_command_is_one_that_the_command_line_takes(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = COMMANDS.commands[name]
    if arguments:
        command.make_context(name, arguments)


def test_the_fleet_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(block("fleet.toml"))
    assert [env.id for env in read_fleet_file(file).env] == ["reverse-text", "guess-number"]


def test_the_table_has_every_metric_with_its_type() -> None:
    rows = re.findall(r"^\| `(envbus_\w+)` \| (\w+) \|", TEXT, re.MULTILINE)
    real = re.findall(r"^# TYPE (\w+) (\w+)$", page(), re.MULTILINE)
    assert sorted(rows) == sorted(real)


def test_the_table_has_every_state() -> None:
    assert set(table("state")) == set(get_args(ServerState))


def test_the_alarms_are_valid_and_use_real_metrics(promtool: str, tmp_path: Path) -> None:
    file = tmp_path / "alarms.yml"
    file.write_text(block("alarms.yml"))
    checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, timeout=20)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    real = set(re.findall(r"^# TYPE (\w+) ", page(), re.MULTILINE))
    used = set(re.findall(r"\b(envbus_\w+)", block("alarms.yml")))
    assert used <= real, used - real


ALARM_TESTS = """
rule_files: [alarms.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - { series: 'envbus_controller_replicas{controller="c", env="e"}', values: "3x20" }
      - { series: 'envbus_controller_replicas{controller="c", env="none"}', values: "1x20" }
      - { series: 'envbus_controller_replicas{controller="c", env="fine"}', values: "1x20" }
      - { series: 'envbus_server_state{env="e", server="s1", state="ready"}', values: "1x20" }
      - { series: 'envbus_server_state{env="e", server="s1", state="full"}', values: "0x20" }
      - { series: 'envbus_server_state{env="e", server="s2", state="ready"}', values: "0x20" }
      - { series: 'envbus_server_state{env="fine", server="s3", state="full"}', values: "1x20" }
      - { series: 'envbus_server_rollouts_total{env="e", server="s1", outcome="done"}', values: "0+6x20" }
      - { series: 'envbus_server_rollouts_total{env="e", server="s1", outcome="failed"}', values: "0+4x20" }
      - { series: 'envbus_server_rollouts_total{env="fine", server="s3", outcome="done"}', values: "0+9x20" }
      - { series: 'envbus_server_rollouts_total{env="fine", server="s3", outcome="failed"}', values: "0+1x20" }
    alert_rule_test:
      - eval_time: 10m
        alertname: ServersMissing
        exp_alerts:
          - { exp_labels: { env: e }, exp_annotations: { summary: "e lacks 2 servers" } }
          - { exp_labels: { env: none }, exp_annotations: { summary: "none lacks 1 servers" } }
      - eval_time: 18m
        alertname: RolloutsFail
        exp_alerts:
          - exp_labels: { env: e }
            exp_annotations: { summary: "over 20 % of the rollouts of e fail; the dashboard has them by type" }
"""


def test_alarms_go_off_when_they_should(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "alarms.yml").write_text(block("alarms.yml"))
    (tmp_path / "tests.yml").write_text(ALARM_TESTS)
    done = subprocess.run(
        [promtool, "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stdout + done.stderr
