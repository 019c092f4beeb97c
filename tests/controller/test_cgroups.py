"""Groups of servers, in this host's real cgroup v2 tree, and limits that few such trees offer, in a plain folder."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from controller_stage import Fleet, env_table, kill, operator, pids, running, wait_until
from other_user import needs_root

from envbus.bus.control_messages import Scale
from envbus.controller.cgroups import Cgroups, find_folder, remove
from envbus.controller.enclosures import Enclosure
from envbus.controller.host_checks import check_host
from envbus.controller.isolation import Limits
from envbus.controller.processes import Ended, Record
from envbus.controller.spec import read_fleet_file
from envbus.errors import UsageError

INSIDE = """
import os, sys
from pathlib import Path
from envbus.controller.cgroups import Cgroups, check_folder, find_folder, own_group
from envbus.controller.isolation import Limits
folder = find_folder(None)
check_folder(folder, {})
group = Cgroups(folder).make("ab" * 16, Limits())
(group / "cgroup.procs").write_text(str(os.getpid()))
print(folder, own_group(), *(folder / "envbus-controller" / "cgroup.procs").read_text().split())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in the host's cgroup v2 tree."""
    mounts = Path("/proc/self/mountinfo").read_text()
    mount = re.search(r"^\S+ \S+ \S+ \S+ (\S+) .* - cgroup2 ", mounts, re.MULTILINE)
    if mount is None or os.geteuid() != 0:
        pytest.skip("there is no cgroup v2 tree here, or it is not ours to write")
    folder = Path(mount[1]) / f"envbus-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cgroup v2 is there, but read only: {error}")
    yield folder
    for procs in folder.rglob("cgroup.kill"):
        procs.write_text("1")
    assert remove(folder)


@needs_root
async def test_all_of_a_server_ends_with_it_and_its_group_is_removed(fleet: Fleet, folder: Path) -> None:
    """P46: also what has left its session, its parent and its environment variables behind."""
    hidden = "env -i setsid sleep 600 & sleep 0.01; exec sleep 601"
    table = env_table("a", command=["/bin/sh", "-c", hidden], user="nobody", env_dir_path=[])
    async with running(fleet, fleet.spec(table, cgroup=str(folder))), operator(fleet) as op:
        (first,) = await op.until(lambda reports: len(reports) == 1)
        group = folder / f"envbus-{first.server}"
        await wait_until(lambda: len((group / "cgroup.procs").read_text().split()) == 2)
        assert first.pid in [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        kill(first)
        await op.until(lambda reports: len(reports) == 1 and pids(reports) not in ({first.pid}, {None}))
        await wait_until(lambda: not group.exists())
        await op.ask(Scale(env="a", replicas=0))
        await wait_until(lambda: not list(folder.glob("envbus-*")))


def test_a_limit_whose_controller_the_folder_has_not_is_refused(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "fleet.toml"
    below = folder / "below"
    below.mkdir()
    head = '[controller]\ncgroup = "FOLDER"\n[[env]]\nid = "a"\n[env.limits]\nopen_files = 99\n'
    file.write_text(head.replace("FOLDER", str(below)) + 'memory = "1GiB"\n')
    with pytest.raises(UsageError, match=r"fleet.toml:7: env\[0\].limits.memory: \S+ has no controller memory \(for"):
        check_host(read_fleet_file(file))
    file.write_text(head.replace("FOLDER", str(tmp_path)))
    with pytest.raises(UsageError, match=r"fleet.toml:2: controller.cgroup: \S+ is no cgroup v2 folder"):
        check_host(read_fleet_file(file))


def test_what_systemd_delegates_is_found_and_the_controller_goes_below_it(folder: Path) -> None:
    """As for a service with Delegate=yes: a group with limited groups below must have no processes itself."""
    os.setxattr(folder, "trusted.delegate", b"1")
    enter = f'echo $$ > {folder}/cgroup.procs; sleep 60 & "$0" -c "$1"; kill $!'
    done = subprocess.run(["sh", "-c", enter, sys.executable, INSIDE], capture_output=True, text=True, timeout=30)
    found, own, *moved = done.stdout.split()
    assert (found, own) == (str(folder), f"{folder}/envbus-{'ab' * 16}"), done
    assert len(moved) == 2, "the shell and its sleep"


def test_groups_that_a_killed_controller_has_left_are_removed_once_empty(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, used = (folder / f"envbus-{digits * 16}" for digits in ("01", "02"))
    for group in (empty, used):
        group.mkdir()
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        (used / "cgroup.procs").write_text(str(sleeper.pid))
        Cgroups(folder).make("ab" * 16, Limits())
        assert empty.exists(), "young: another controller may be about to use it"
        monkeypatch.setattr("envbus.controller.cgroups.STALE_S", -1.0)
        Cgroups(folder).make("cd" * 16, Limits())
        assert (empty.exists(), used.exists()) == (False, True)
        sleeper.kill()


def test_without_delegation_the_remedy_is_told() -> None:
    with pytest.raises(UsageError, match=r"no cgroup v2 folder is delegated .* Delegate=yes"):
        find_folder(None)


def test_the_limits_are_written_as_the_kernel_wants_them(tmp_path: Path) -> None:
    """A plain folder: that the kernel keeps them is not shown here."""
    limits = Limits(memory="1.5GiB", cpus=1.5, processes=100)
    (tmp_path / "cgroup.type").touch()
    (tmp_path / "cgroup.procs").touch()
    group = Cgroups(tmp_path).make("ab" * 16, limits)
    assert {file.name: file.read_text() for file in group.iterdir()} == {
        "memory.max": "1610612736",
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "pids.max": "100",
    }
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_an_end_for_want_of_memory_is_told_as_such(tmp_path: Path) -> None:
    """A plain folder with what the kernel writes into a group (its documentation has the format)."""
    (tmp_path / "memory.max").write_text("1610612736\n")
    events = "low 0\nhigh 0\nmax 41\noom 2\noom_kill 1\noom_group_kill 0\n"
    (tmp_path / "memory.events").write_text(events)
    cause = Enclosure(cgroup=tmp_path).memory_kills()
    ended = Ended(Record("s", "e", 0, 0, "", 1, 0.0, "e.log", 0.0), "signal SIGKILL", (), cause)
    assert ended.summary.startswith("signal SIGKILL (out of memory: limits.memory is 1,610,612,736 bytes, and 1 of")
    (tmp_path / "memory.events").write_text(events.replace("oom_kill 1", "oom_kill 0"))
    assert Enclosure(cgroup=tmp_path).memory_kills() == ""
