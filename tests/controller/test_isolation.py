"""Servers kept apart: another user, limits, variables, folders; and what a host cannot do is told before the start."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from controller_stage import (
    ENVS,
    Fleet,
    client_of,
    env_table,
    kill,
    operator,
    pids,
    rollouts,
    running,
    wait_until,
)
from other_user import NOBODY, needs_root, opened

from envbus.bus.control_messages import LogLines, LogsRequest
from envbus.controller import launcher
from envbus.controller.adoption import ServerRegister
from envbus.controller.controller import Controller
from envbus.controller.host_checks import check_host
from envbus.controller.plan import plan_of
from envbus.controller.processes import Record
from envbus.controller.spec import read_fleet_file
from envbus.errors import UsageError

TELL = """
id; echo "in $(pwd)"; umask; env; tr -s ' ' < /proc/self/limits
grep NoNewPrivs /proc/self/status; echo kept > kept; echo told; exec sleep 600
"""


@needs_root
async def test_a_server_is_what_its_fleet_file_says(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees neither the controller's keys nor those of other envs; only its controller's user reads its log."""
    monkeypatch.setenv("CONTROLLERS_KEY", "sk-controller")
    monkeypatch.setenv("WANTED", "yes")
    tell = ["/bin/sh", "-c", TELL]
    limits = {"open_files": 300, "user_processes": 4321, "address_space": "2GiB"}
    apart = env_table("a", command=tell, user="nobody", private_tmp=True, no_new_privs=True, limits=limits)
    apart |= {"inherit": ["PATH", "WANTED", "UNSET"], "variables": {"OWN": "1"}, "env_dir_path": []}
    other = env_table("b", command=tell, cwd=str(fleet.folder), variables={"OTHERS_KEY": "sk-other"})
    async with running(fleet, fleet.spec(apart, other)), operator(fleet) as op:
        reports = {report.env: report for report in await op.until(lambda reports: len(reports) == 2)}
        log_a, log_b = (Path(reports[env].log_file or "") for env in ("a", "b"))
        await wait_until(lambda: "told" in log_a.read_text() and "told" in log_b.read_text())
        logs = await op.ask(LogsRequest(server=reports["a"].server))
        assert isinstance(logs, LogLines)
        scratch = Path(tempfile.gettempdir(), f"envbus-{reports['a'].server}")
        assert {
            "uid=65534(nobody) gid=65534(nogroup) groups=65534(nogroup)",
            f"in {scratch}",
            "0077",
            "WANTED=yes",
            "OWN=1",
            "USER=nobody",
            f"HOME={pwd.getpwuid(NOBODY).pw_dir}",
            f"TMPDIR={scratch}",
            "Max open files 300 300 files ",
            "Max processes 4321 4321 processes ",
            "Max address space 2147483648 2147483648 bytes ",
            "NoNewPrivs:\t1",
        } <= set(logs.lines)
        assert "sk-" not in "".join(logs.lines)
        assert stat.S_IMODE(os.stat(log_a).st_mode) == 0o600
        assert os.stat(scratch).st_uid == NOBODY
        assert os.listdir(scratch) == ["kept"]
        has_all = {f"in {fleet.folder}", "CONTROLLERS_KEY=sk-controller", "NoNewPrivs:\t0"}
        assert has_all <= set(log_b.read_text().splitlines()), "as every server without these keys"
    assert not fleet.processes(), "a process of another user is stopped, too"
    assert scratch.name not in os.listdir(scratch.parent)
    assert any("inherit names it: UNSET" in note.text for note in fleet.notes)


@needs_root
async def test_servers_of_another_user_serve_are_adopted_and_end(fleet: Fleet) -> None:
    """What one of them leaves ends with it; the lifeline, logs and signals reach them."""
    table = env_table("a", user="nobody", max_concurrent=2, args={"helpers": True})
    fleet.write(table, adopt=True)
    house = opened(ENVS / "fleet_env.py")
    up = fleet.up(inside=house)
    async with operator(fleet) as op, client_of(fleet, "a") as a:
        (first,) = await op.until_running(1)
        helpers = [process for process in fleet.processes() if process.name() == "sleep"]
        assert {process.uids().effective for process in [psutil.Process(first.pid), *helpers]} == {NOBODY}
        up.kill()
        await asyncio.to_thread(up.wait, 20)
        fleet.write(table, adopt=False)
        again = fleet.up(inside=house)
        assert pids(await op.until_running(1)) == {first.pid}
        assert await rollouts(a, 2) == [first.pid] * 2
        kill(first)
        (second,) = await op.until(lambda now: [r.state for r in now] == ["running"] and pids(now) != {first.pid})
        await wait_until(lambda: not any(process.is_running() for process in helpers))
        again.kill()
        await asyncio.to_thread(again.wait, 20)
        await wait_until(lambda: not psutil.pid_exists(second.pid or 0))
        assert "has stopped" in (fleet.folder / (second.log_file or "")).read_text(), "in order, by its lifeline"


async def test_an_end_by_the_address_space_is_told_as_such(fleet: Fleet) -> None:
    hungry = [sys.executable, "-c", "bytearray(1 << 33)"]
    spec = fleet.spec(env_table("a", command=hungry, limits={"address_space": "4GiB"}))
    async with running(fleet, spec), operator(fleet) as op:
        (report,) = await op.until(lambda reports: [r.state for r in reports] == ["failed"])
    said = "exit code 1 (out of memory: limits.address_space is 4,294,967,296 bytes): MemoryError"
    assert (report.last_exit or "").startswith(said)


REFUSED = [
    ('user = "no-such"', "3: env[0].user: this host has no user 'no-such'; make it (useradd --system no-such)"),
    ('user = "nobody"\ngroups = ["no-such"]', "4: env[0].groups: this host has no group 'no-such'; make it"),
    ('user = "nobody"\ncommand = ["/bin/sh"]\ncwd = "."', "5: env[0].cwd: FOLDER: Permission denied; make the folder"),
    ('cwd = "absent"', "3: env[0].cwd: FOLDER/absent: No such file or directory; make the folder"),
    ('user = "nobody"\ncommand = ["FOLDER/fleet.toml"]', "4: env[0].command: FOLDER/fleet.toml is not there, or must"),
    (
        'user = "nobody"\npython = "./python"',
        "4: env[0].python: FOLDER/python is not there, or must not be run",
    ),
    (
        'user = "nobody"\ncommand = ["/bin/sh"]\nenv_dir_path = ["."]',
        "5: env[0].env_dir_path: FOLDER must not be read by user 65534, group 65534, or is not there; give",
    ),
    (
        'user = "nobody"\ncommand = ["/bin/sh"]\n[bus]\naddress = "nats://h:1"\nserver_context = "srv.json"',
        "5: bus: FOLDER/srv.json must not be read by user 65534, group 65534, or is not there; give [bus]",
    ),
    (
        'user = "nobody"\ncommand = ["/bin/sh"]\n[bus]\nserver_context = "mine"',
        "5: bus: the servers' user does not have the NATS CLI context 'mine' of this one; give [bus] server_context as",
    ),
    (
        'user = "nobody"\ncommand = ["/bin/sh"]\nprivate_tmp = true',
        "5: env[0].private_tmp: FOLDER must not be read by user 65534, group 65534, or is not there; set TMPDIR",
    ),
    ("limits = { user_processes = 9 }", "3: env[0].limits.user_processes: root is not bound by it; give user, or"),
    ("[env.limits]\nopen_files = 1073741824", "4: env[0].limits.open_files: 1073741824 is more than this host lets"),
]
WRONG = [
    ('groups = ["daemon"]', "groups go with user"),
    ('umask = "999"', "3: env[0].umask: "),
    ('inherit = ["A=B"]', "3: env[0].inherit[0]: "),
    ('limits = { memory = "4" }', "3: env[0].limits: 4 bytes is no sensible size; give a unit, e.g. '4GiB'"),
    ('limits = { swap = "1GiB" }', "3: env[0].limits: swap goes with memory"),
    ('limits = { ram = "1GiB" }', "3: env[0].limits.ram: unknown key"),
]


def said_of(folder: Path, lines: str) -> str:
    (folder / "srv.json").write_text('{"url": "nats://h:1"}')
    file = folder / "fleet.toml"
    file.write_text(f'[[env]]\nid = "a"\n{lines.replace("FOLDER", str(folder))}\n')
    with pytest.raises(UsageError) as caught:
        check_host(read_fleet_file(file))
    return str(caught.value)


@needs_root
@pytest.mark.parametrize(("lines", "expected"), REFUSED)
def test_what_this_host_cannot_do_is_told_with_file_line_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, expected: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert expected.replace("FOLDER", str(tmp_path)) in said_of(tmp_path, lines)


@pytest.mark.parametrize(("lines", "expected"), WRONG)
def test_what_makes_no_sense_is_told_with_its_key(tmp_path: Path, lines: str, expected: str) -> None:
    assert expected in said_of(tmp_path, lines)


@needs_root
def test_without_the_rights_to_become_another_user_nothing_starts(fleet: Fleet) -> None:
    """All that is wrong at once; and the plan of what is right says what is done."""
    (fleet.folder / "logs").mkdir()
    right = env_table("right", cwd="logs", inherit=["PATH"], limits={"address_space": "1GiB"})
    (plan,) = plan_of(fleet.spec(right))["envs"]
    assert plan["isolation"] == ["inherits only PATH", f"in {fleet.folder / 'logs'}", "address space at most 1.0GiB"]
    own = env_table("c", user="root", groups=["daemon"], command=["/bin/true"])
    fleet.write(right, env_table("a", user="nobody", command=["/bin/true"]), env_table("b", cwd="absent"), own)
    refused = fleet.up("--dry-run", inside=["setpriv", "--bounding-set=-setuid,-sys_ptrace"])
    assert refused.wait(60) == 2
    said = "user: user 0 must not run servers as others: run the controller as root, with CAP_SETUID CAP_SYS_PTRACE"
    assert f"env[1].{said}" in fleet.said
    assert f"env[3].{said}" in fleet.said, "its own user, but with other groups"
    assert "env[2].cwd: " in fleet.said
    assert not list((fleet.folder / "logs").iterdir())


async def test_a_controller_refuses_what_the_host_cannot_do(fleet: Fleet) -> None:
    with pytest.raises(UsageError, match=r"one\.toml:\d+: env\[0\]\.user: this host has no user 'no-such'"):
        await Controller(fleet.spec(env_table("a", user="no-such"))).run()


@needs_root
def test_rights_that_a_controller_was_lent_are_not_passed_on() -> None:
    """A systemd unit's AmbientCapabilities=: they would outlive the change of user."""
    plan: launcher.Plan = {"cgroup": None, "rlimits": {}, "umask": None, "uid": NOBODY, "gid": NOBODY, "groups": []}
    plan |= {"no_new_privs": False, "cwd": None, "program_key": "command"}
    lent = "+setuid,+setgid,+dac_read_search"
    lender = ["setpriv", "--reuid=1", "--regid=1", "--groups=1,2", f"--inh-caps={lent}", f"--ambient-caps={lent}"]
    script = [sys.executable, "-I", "-S", launcher.__file__, "run", json.dumps(plan)]
    done = subprocess.run(
        [*lender, *script, "/bin/cat", "/proc/self/status"], capture_output=True, text=True, timeout=20
    )
    status = dict(line.split(":\t") for line in done.stdout.splitlines() if ":\t" in line)
    assert status["Uid"] == "\t".join([str(NOBODY)] * 4), done
    assert status["Groups"].split() == [], "nor are groups"
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}


async def test_what_a_killed_controller_has_left_is_cleared_by_the_next_one(fleet: Fleet) -> None:
    scratch = fleet.folder / "scratch"
    scratch.mkdir()
    spec = fleet.spec(env_table("a", replicas=0))
    dead = Record("ab" * 16, "a", 0, 0, "", os.getpid(), 0.0, "a.log", 0.0, scratch=str(scratch))
    ServerRegister(spec.controller.log_dir).write([dead])
    async with running(fleet, spec):
        await wait_until(lambda: not scratch.exists())


async def test_what_is_not_there_any_more_at_a_later_start_is_why_it_failed(fleet: Fleet) -> None:
    cwd = fleet.folder / "cwd"
    cwd.mkdir()
    leave = ["/bin/sh", "-c", f"rmdir {cwd}"]
    async with running(fleet, fleet.spec(env_table("a", cwd="cwd", command=leave))), operator(fleet) as op:
        (report,) = await op.until(lambda reports: [r.state for r in reports] == ["failed"])
    said = f"exit code 126: error[usage]: it cannot be started as its fleet file says: cwd: {cwd}: No such file or"
    assert (report.last_exit or "").startswith(said)
