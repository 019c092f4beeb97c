"""The fleet file: what it means, and what its errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbus.controller.plan import plan_of
from envbus.controller.spec import FleetSpec, fleet_of, read_fleet_file
from envbus.errors import UsageError

FULL = """
[bus]
embedded = true
port = 4333
websocket_port = 4334
monitoring_port = 4335
prefix = "lab"

[controller]
id = "box-1"
log_dir = "logs"
metrics_port = 9100
json_logs = true

[[env]]
id = "owner/maths"
args = { level = 5 }
replicas = 3
max_concurrent = 8
variables = { HF_HOME = "/data" }
python = "venv/bin/python"
env_dir_path = ["envs"]
allow_keys = ["OPENAI_API_KEY=https://api.openai.com"]
log_level = "DEBUG"
grace = 5
restart = { initial_delay_s = 2, max_failures = 2 }

[[env]]
id = "owner/maths"
args = { level = 1 }
command = ["uv", "run", "envbus"]

[env.autoscale]
min = 2
max = 9
"""


def read(tmp_path: Path, text: str) -> FleetSpec:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    return read_fleet_file(file)


def problem(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(str(tmp_path), "")


def test_a_full_file(tmp_path: Path) -> None:
    """P35: other arguments, another name on the bus."""
    spec = read(tmp_path, FULL)
    hard, easy = spec.env
    assert spec.controller_id == "box-1"
    assert spec.controller.log_dir == tmp_path / "logs" / "box-1"
    assert hard.python == str(tmp_path / "venv/bin/python")
    assert hard.env_dir_path == [tmp_path / "envs"]
    assert (hard.first_replicas, easy.first_replicas) == (3, 2)
    assert hard.bus_name.startswith("owner/maths~")
    assert hard.bus_name != easy.bus_name
    assert hard.digest != easy.digest


def test_the_plan_has_what_runs_and_no_secrets(tmp_path: Path) -> None:
    plan = plan_of(read(tmp_path, FULL))
    assert [env["servers"] for env in plan["envs"]] == ["3", "2 to 9"]
    assert plan["envs"][1]["command"] == ["uv", "run", "envbus", "serve", "owner/maths"]
    assert plan["envs"][0]["variables"] == ["HF_HOME"]
    spec = read(tmp_path, '[bus]\naddress = "nats://u:hunter2@h:1"\n[[env]]\nid = "a"\nvariables = { K = "hunter2" }')
    assert "hunter2" not in str(plan_of(spec))


def test_the_default_name_is_of_host_and_file(tmp_path: Path) -> None:
    spec = read(tmp_path, '[[env]]\nid = "a"')
    assert spec.controller_id.endswith("-fleet")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[env]\nid = 1", "/fleet.toml: not TOML: "),
        ("[bus]\nport = 1", "/fleet.toml: env: is missing"),
        ('[[env]]\nid = "a"\n\n[[env]]\nid = "b"\nreplicas = -1', "/fleet.toml:6: env[1].replicas: Input should be"),
        ('[[env]]\nid = "a"\nreplica = 1', "/fleet.toml:3: env[0].replica: unknown key"),
        ('[[env]]\nname = "a"', "/fleet.toml:1: env[0].id: is missing"),
        ('[buss]\n[[env]]\nid = "a"', "/fleet.toml:1: buss: unknown key"),
        ('[[env]]\nid = "a"\n[[env]]\nid = "a"', "env 1 and env 2 are both 'a' on the bus"),
        ('[[env]]\nid = "a~b"', "env 1 ('a~b'): env_id 'a~b'"),
        ('[bus]\nprefix = "a b"\n[[env]]\nid = "a"', "/fleet.toml:2: bus.prefix: prefix 'a b'"),
        ('[bus]\naddress = "h"\nembedded = true\n[[env]]\nid = "a"', "/fleet.toml:1: bus: give address or embedded"),
        ('[controller]\nid = "a b"\n[[env]]\nid = "a"', "/fleet.toml:2: controller.id: "),
        ('[[env]]\nid = "a"\nreplicas = 2\nautoscale = {max = 3}', "/fleet.toml:1: env[0]: give replicas or autoscale"),
        ('[[env]]\nid = "a"\n[env.autoscale]\nmin = 3\nmax = 2', "/fleet.toml:3: env[0].autoscale: max must not"),
        (
            '[[env]]\nid = "a"\n[env.autoscale]\nmax = 2\n[[env]]\nid = "b"\n[env.autoscale]\nmax = 0',
            "/fleet.toml:8: env[1]",
        ),
        ('[[env]]\nid = "a"\npython = "p"\ncommand = ["c"]', "/fleet.toml:1: env[0]: give python or command"),
        ('[bus]\nembedded = true\n[controller]\nadopt = true\n[[env]]\nid = "a"', "adopt needs a bus that outlives"),
        ('[bus]\naddress = "h"\nport = 1\n[[env]]\nid = "a"', "ports are those of the embedded"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problem(tmp_path, text)


def test_all_problems_at_once(tmp_path: Path) -> None:
    assert problem(tmp_path, '[[env]]\nid = "a"\nx = 1\ny = 2').count("unknown key") == 2


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FULL)
    spec = read_fleet_file(file, overrides={"bus": {"address": "nats://h:1"}, "controller": {"id": "other"}})
    assert (spec.bus.address, spec.bus.embedded, spec.bus.prefix) == ("nats://h:1", False, "lab")
    assert spec.controller_id == "other"


def test_a_fleet_of_names() -> None:
    spec = fleet_of(["gsm8k", "reverse-text"], replicas=2)
    assert [(env.bus_name, env.replicas, env.max_concurrent) for env in spec.env] == [
        ("gsm8k", 2, 64),
        ("reverse-text", 2, 64),
    ]
    with pytest.raises(UsageError, match="both 'a' on the bus"):
        fleet_of(["a", "a"])


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the fleet file"):
        read_fleet_file(tmp_path / "none.toml")
