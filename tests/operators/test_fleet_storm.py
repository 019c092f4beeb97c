"""Two envs under vf-eval while operators scale and restart them and servers are killed at random."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from operator_site import ENVS, Site
from test_operator_fleet import ready

KILL_FOR_S = 8.0
TRUTH_S = 3.0
EXAMPLES, ROLLOUTS = 40, 5
PRESENT = ("loading", "ready", "full", "lagging", "suspect", "draining")
FLEET = """
[controller]
id = "storm"
log_dir = "{logs}"
"""
ENV = """
[[env]]
id = "probe-env"
name = "{name}"
args = {{ delay_s = 0.5, size = 40 }}
replicas = {replicas}
max_concurrent = 4
env_dir_path = ["{envs}"]
allow_urls = ["http://127.0.0.1:*"]
restart = {{ initial_delay_s = 0.2, max_delay_s = 1.0, max_failures = 50 }}
"""


class Killer(threading.Thread):
    """Kills a random server of the site each second; knows when each one died."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.died_at: dict[str, float] = {}
        self._site = site
        self._seed = random.Random(3)

    def run(self) -> None:
        until = time.monotonic() + KILL_FOR_S
        while time.monotonic() < until:
            victim, server = self._seed.choice(sorted(servers_of(self._site), key=lambda found: found[1]))
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGKILL)
                self.died_at[server] = time.monotonic()
            time.sleep(1)


def servers_of(site: Site) -> Iterator[tuple[psutil.Process, str]]:
    """The server processes that run now, with their ids."""
    for process in site.cli.processes():
        with contextlib.suppress(psutil.Error):
            if "serve" in process.cmdline():
                yield process, process.environ()["ENVBUS_SERVE_SERVER_ID"]


def vf_eval(site: Site, name: str, folder: Path) -> subprocess.Popen[str]:
    code = "import sys; from envbus.cli.vf_eval import main; sys.exit(main())"
    options = ["-n", str(EXAMPLES), "-r", str(ROLLOUTS), "--demo-model", "--disable-tui", "-o", str(folder / name)]
    where = ["--address", site.url, "--prefix", site.prefix, "--name", name]
    # Under one kill a second the same job is hit again and again: more attempts than the default of 3.
    limits = {"ENVBUS_CLIENT_MAX_ATTEMPTS": "20", "ENVBUS_CLIENT_NO_SERVER_TIMEOUT_S": "30"}
    with (folder / f"{name}.txt").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, "probe-env", *options, *where],
            cwd=folder,
            env=site.cli.environ(limits),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )


def look(site: Site, killer: Killer) -> dict[str, Any]:
    """``envbus ls``; fails if it shows as there what died three seconds ago, or misses what has long run."""
    since = time.time() - TRUTH_S
    long_there = {server for process, server in servers_of(site) if process.create_time() < since}
    view: dict[str, Any] = site.json("ls")
    now = time.monotonic()
    shown = {each["server"]: each["state"] for each in view["servers"]}
    for server, died_at in list(killer.died_at.items()):
        if now - died_at > TRUTH_S:
            assert shown.get(server) not in PRESENT, f"killed {now - died_at:.1f} s ago"
    assert long_there & {server for _, server in servers_of(site)} <= shown.keys()
    return view


def wanted(view: dict[str, Any]) -> dict[str, int]:
    return {env["env"]: env["wanted"] for env in view["envs"]}


def saved(folder: Path) -> list[dict[str, Any]]:
    [file] = folder.rglob("results.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.timeout(240)
def test_every_rollout_ends_once_whatever_happens_to_the_fleet(site: Site, tmp_path: Path) -> None:
    """P19, P46: 3 → 5 → 2 servers, a rolling restart, a SIGKILL each second; ls shows the truth within 3 s."""
    envs = "".join(ENV.format(name=name, replicas=replicas, envs=ENVS) for name, replicas in (("a", 3), ("b", 2)))
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(logs=tmp_path / "logs") + envs)
    controller = site.start("up", str(file), until="runs; logs")
    site.until(lambda view: ready("a", 3)(view) and ready("b", 2)(view), limit_s=90)
    evals = {name: vf_eval(site, name, tmp_path) for name in ("a", "b")}
    site.started += evals.values()
    killer = Killer(site)
    try:
        killer.start()
        assert site.run("scale", "a", "5").code == 0
        assert wanted(look(site, killer)) == {"a": 5, "b": 2}
        assert site.run("restart", "b").code == 0
        assert site.run("scale", "a", "2").code == 0
        assert wanted(look(site, killer)) == {"a": 2, "b": 2}
        while killer.is_alive():
            look(site, killer)
    finally:
        killer.join()
    site.until(lambda view: ready("a", 2)(view) and ready("b", 2)(view), limit_s=90)
    assert len(list(servers_of(site))) == 4
    for name, process in evals.items():
        assert process.wait(90) == 0, (tmp_path / f"{name}.txt").read_text()
        rows = saved(tmp_path / name)
        assert [row.get("error") for row in rows] == [None] * (EXAMPLES * ROLLOUTS)
        assert Counter(row["example_id"] for row in rows) == dict.fromkeys(range(EXAMPLES), ROLLOUTS)
    assert len(killer.died_at) >= KILL_FOR_S / 2
    controller.terminate()
    out, err = controller.communicate(timeout=60)
    assert controller.returncode == 0, out + err
