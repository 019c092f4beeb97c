"""deploy/systemd: units that systemd takes without a word, commands that envbus takes; a walk through its README."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from artefacts import DEPLOY, assert_told, broken_copy, needed
from envbus_commands import parsed

from envbus.controller.spec import read_fleet_file
from envbus.errors import UsageError
from envbus.provision.access import read_access_file
from envbus.provision.certificates import make
from envbus.provision.folder import provision
from envbus.settings import ServerSettings

FOLDER = DEPLOY / "systemd"
UNITS = {
    "envbus-controller.service": "envbus-controller.service",
    "envbus-dashboard.service": "envbus-dashboard.service",
    "envbus-gateway@.service": "envbus-gateway@gsm8k.service",
    "envbus-nats.service": "envbus-nats.service",
}
"""Files, and what of each is started."""
DROP_INS = {
    "gpus.conf": "envbus-controller.service",
    "other-users.conf": "envbus-controller.service",
    "nats-cluster.conf": "envbus-nats.service",
}
EXPOSURE = 20
"""Tenths of what systemd-analyze security says at most: 0 is closed, 100 open."""


def programs() -> tuple[str, str]:
    package = "Debian's package systemd"
    return needed("systemd-analyze", package=package), needed("systemd-sysusers", package=package)


def problems(folder: Path, root: Path) -> Iterator[str]:
    """What is wrong with a folder like deploy/systemd, once it is installed below a root of its own."""
    install(folder, root)
    yield from fleet_problems(folder)
    yield from said_by("verify", "--man=no", *UNITS.values(), root=root)
    for unit in UNITS:
        yield from said_by(
            "security", "--offline=true", f"--threshold={EXPOSURE}", unit, root=root, needs="exposure level"
        )
    yield from unit_problems(folder, root)


def install(folder: Path, root: Path) -> None:
    """What README.md does: units and users; programs are stood in for."""
    system = root / "etc/systemd/system"
    system.mkdir(parents=True)
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    for target in Path("/usr/lib/systemd/system").glob("*.target"):
        shutil.copy(target, root / "usr/lib/systemd/system")
    for unit in folder.glob("*.service"):
        shutil.copy(unit, system)
    for program in ("opt/envbus/bin/envbus", "opt/envbus/bin/nats-server", "bin/kill"):
        (root / program).parent.mkdir(parents=True, exist_ok=True)
        (root / program).write_text("#!/bin/sh\n")
        (root / program).chmod(0o755)


def said_by(*arguments: str, root: Path, needs: str | None = None) -> Iterator[str]:
    """All that systemd-analyze says: it passes over keys that it does not know, and ends with 0."""
    command = [programs()[0], arguments[0], f"--root={root}", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if needs is None and (done.stdout or done.stderr or done.returncode):
        yield f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    elif needs is not None and (done.returncode or done.stderr or needs not in done.stdout):
        yield f"{arguments[-1]}: {done.stdout.strip().splitlines()[-1:]} {done.stderr}"


def fleet_problems(folder: Path) -> Iterator[str]:
    """The controller's example files, and whether its unit leaves the time that they need."""
    try:
        fleet = read_fleet_file(folder / "fleet.toml")
    except UsageError as error:
        yield str(error)
        return
    limits = ServerSettings()
    needed_s = max(env.grace for env in fleet.env) + limits.collect_grace_s + limits.teardown_timeout_s
    service = keys(folder / "envbus-controller.service")
    if float(service.get("TimeoutStopSec", "90")) < needed_s:
        yield f"TimeoutStopSec is less than the {needed_s} s that a drain may take"
    for key, value in {"KillMode": "mixed", "Delegate": "yes", "OOMPolicy": "continue"}.items():
        if service.get(key) != value:
            yield f"{key} is not {value}"


def unit_problems(folder: Path, root: Path) -> Iterator[str]:
    """Commands that envbus does not take, and users that nobody makes."""
    done = subprocess.run(
        [programs()[1], f"--root={root}", folder / "envbus.sysusers"], capture_output=True, text=True, timeout=60
    )
    if done.returncode or done.stderr.count("\n") > done.stderr.count("Creating "):
        yield f"sysusers: {done.stderr}"
        return
    made = {line.partition(":")[0] for line in (root / "etc/passwd").read_text().splitlines()}
    for file in UNITS:
        service = keys(folder / file)
        if service.get("User") not in made:
            yield f"{file}: nobody makes the user {service.get('User')}"
        program, *arguments = shlex.split(service["ExecStart"])
        if Path(program).name == "envbus":
            yield from refused(file, arguments)


def refused(file: str, arguments: list[str]) -> Iterator[str]:
    try:
        parsed(arguments)
    except UsageError as error:
        yield f"{file}: {error}"


def keys(unit: Path) -> dict[str, str]:
    """The keys of a unit; of those that come more than once the last."""
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_units_have_no_problems(tmp_path: Path) -> None:
    assert list(problems(FOLDER, tmp_path / "root")) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "seen"),
    [
        ("envbus-controller.service", "ProtectSystem=", "ProtectSytem=", "Unknown key 'ProtectSytem'"),
        ("envbus-controller.service", "[Install]", "[Instal]", "Unknown section"),
        ("envbus-controller.service", "Restart=on-failure", "Restart=on-fail", "restart specifier"),
        ("envbus-controller.service", "TimeoutStopSec=180", "TimeoutStopSec=60", "TimeoutStopSec is less"),
        ("envbus-controller.service", "KillMode=mixed\n", "", "KillMode is not mixed"),
        ("envbus-controller.service", "Delegate=yes", "Delegated=yes", "Delegate is not yes"),
        ("envbus-controller.service", "bin/envbus up", "bin/envbsu up", "is not executable"),
        ("envbus-controller.service", "--log-dir", "--logdir", "--logdir"),
        ("envbus-controller.service", "User=envbus", "User=envbuss", "nobody makes the user envbuss"),
        ("envbus-controller.service", "NoNewPrivileges=yes\n", "PrivateNetwork=\n", "exposure level"),
        ("envbus-dashboard.service", "--port 8017", "--port 80170", "less than or equal to 65535"),
        (
            "envbus-dashboard.service",
            "SystemCallFilter=@system-service",
            "SystemCallFilter=@system-services",
            "Unknown",
        ),
        ("envbus-gateway@.service", "--env ${FLEET_ENV}", "", "--env"),
        ("envbus-nats.service", "RestartSec=1s", "RestartSec=1sek", "Failed to parse sec value"),
        ("envbus-nats.service", "bin/kill -s", "/bin/kil -s", "is not executable"),
        ("envbus.sysusers", "u envbus-nats", "user envbus-nats", "sysusers"),
        ("fleet.toml", "metrics_port", "metric_port", "metric_port: unknown key"),
        ("fleet.toml", "replicas = 2", "replicas = 2\ngrace = 120", "TimeoutStopSec is less"),
    ],
)
def test_breaking_them_is_seen(tmp_path: Path, file: str, old: str, new: str, seen: str) -> None:
    assert_told(problems(broken_copy(FOLDER, tmp_path, file, old, new), tmp_path / "root"), seen)


@pytest.mark.parametrize("name", sorted(DROP_INS))
def test_what_may_be_added_is_taken_too(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    install(FOLDER, root)
    unit = DROP_INS[name]
    folder = root / "etc/systemd/system" / f"{unit}.d"
    folder.mkdir()
    shutil.copy(FOLDER / "optional" / name, folder)
    assert f"{unit}.d/{name}" in (FOLDER / "optional" / name).read_text()
    assert list(said_by("verify", "--man=no", unit, root=root)) == []
    (folder / name).write_text((FOLDER / "optional" / name).read_text().replace("[Service]", "[Service]\nUsr=x"))
    assert list(said_by("verify", "--man=no", unit, root=root)) != []


def test_variables_in_the_examples_are_ones_that_envbus_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in (FOLDER / "keys.env").read_text().splitlines():
        if not line.startswith("#"):
            monkeypatch.setenv(*line.split("=", 1))
    assert ServerSettings().hold_results_bytes == 2 << 30
    used = set(re.findall(r"\$\{(\w+)\}", (FOLDER / "envbus-gateway@.service").read_text()))
    assert used < set(re.findall(r"^(\w+)=", (FOLDER / "gateway.env").read_text(), re.MULTILINE))


def test_the_walk_through_the_readme_gives_each_user_what_it_needs(tmp_path: Path) -> None:
    """With the files that it hands out, the controller's command finds its bus, and no user has what is not its own."""
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    access, give = (block(readme, mark) for mark in ("toml access.toml", "sh give"))
    (tmp_path / "access.toml").write_text(access)
    make(tmp_path / "access/certificates", hosts=["nats-host"])
    provision(read_access_file(tmp_path / "access.toml"), tmp_path / "access")
    here = re.sub(r' -g "\$owner"', "", give.replace("/etc/", f"{tmp_path}/etc/"))
    subprocess.run(["bash", "-euc", here], cwd=tmp_path, check=True, timeout=60)
    etc = tmp_path / "etc"
    shutil.copy(FOLDER / "fleet.toml", etc / "envbus")
    plan = subprocess.run(
        [sys.executable, "-P", "-m", "envbus", "up", etc / "envbus/fleet.toml", "--dry-run", "--json"],
        env=os.environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(plan.stdout)["bus"] == "tls://nats-host:4222"
    assert sorted(file.stem for file in etc.rglob("*.nk")) == ["dashboard", "node-1", "server"]
    assert sorted(file.name for file in (etc / "envbus-view").rglob("*.key")) == ["dashboard.key"]
    assert not list(etc.rglob("ca.key"))


def block(text: str, mark: str) -> str:
    """A fenced block with a mark."""
    found = re.search(rf"^```{mark}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]
