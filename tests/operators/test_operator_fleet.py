"""Operators' commands on servers that ``envbus up`` runs: scale, drain, restart, logs of the dead, stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from operator_site import ENVS, Site

FLEET = """
[controller]
id = "box"
log_dir = "{logs}"

[[env]]
id = "probe-env"
name = "probe"
replicas = 1
env_dir_path = ["{envs}"]

[[env]]
id = "probe-env"
name = "broken"
args = {{ mode = "missing_import" }}
env_dir_path = ["{envs}"]
restart = {{ initial_delay_s = 0.1, max_delay_s = 0.2, max_failures = 2 }}
"""


def ready(env: str, count: int) -> Callable[[dict[str, Any]], bool]:
    """Whether so many servers of the env, and no others, take jobs, and the controllers want so many."""

    def check(view: dict[str, Any]) -> bool:
        found = next((each for each in view["envs"] if each["env"] == env), None)
        return found is not None and found["wanted"] == count == found["totals"]["servers"] == found["states"].get(
            "ready", 0
        )

    return check


def ids(view: dict[str, Any], env: str) -> set[str]:
    return {each["server"] for each in view["servers"] if each["env"] == env and each["state"] == "ready"}


@pytest.mark.timeout(240)  # each look at the fleet takes a second or two
def test_a_fleet_from_start_to_stop(site: Site, tmp_path: Path) -> None:
    """P17: ls shows the truth of each change, and an env that cannot load with its traceback's end."""
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(logs=tmp_path / "logs", envs=ENVS))
    controller = site.start("up", str(file), until="is ready")
    first = site.until(
        lambda view: ready("probe", 1)(view) and "in a row" in str([env["problems"] for env in view["envs"]]),
        limit_s=60,
    )
    shown = site.run("ls", "broken")
    assert "failed" in shown.out
    assert "no module foo_bar" in shown.out

    assert "probe on" in (told := site.run("scale", "probe", "2", fresh=True)).out, told.err
    assert "1 → 2" in told.out
    two = site.until(ready("probe", 2), limit_s=60)
    assert ids(first, "probe") < ids(two, "probe")

    one = sorted(ids(two, "probe"))[0]
    assert site.run("drain", one).code == 0
    replaced = site.until(ready("probe", 2), limit_s=60)
    assert one not in ids(replaced, "probe"), "its place was filled again"
    log = site.run("logs", one)
    assert log.code == 0, log.err
    assert "has stopped" in log.out, "the controller keeps the log of a server that has ended"

    victim = next(each for each in replaced["servers"] if each["env"] == "probe" and each["state"] == "ready")
    os.kill(victim["pid"], signal.SIGKILL)
    killed = site.json("ls", "probe")
    assert victim["server"] not in ids(killed, "probe"), "the truth within three seconds"
    before = site.until(ready("probe", 2), limit_s=60)

    assert site.run("restart", "probe", fresh=True).code == 0
    site.until(lambda view: ready("probe", 2)(view) and not ids(view, "probe") & ids(before, "probe"), limit_s=60)

    assert site.json("stop", "probe")["left"] == []
    site.until(ready("probe", 0), limit_s=60)
    nothing = site.run("logs", "probe")
    assert nothing.code == 2
    assert "env 'probe' is not one server" in nothing.err
    assert site.json("stop", "--all")["left"] == []
    out, err = controller.communicate(timeout=60)
    assert controller.returncode == 0, out + err
    assert site.json("ls")["controllers"] == []
