"""Runs commands as containers would, without an engine: own mounts, processes and network; Linux and root only.

The root is a read-only tmpfs with this machine's programs bound into it. User, capabilities, environment, files and
temporary folders are the container's. Containers of one stage share a network of their own, so fixed ports are free.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

import envbus

PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ssl", "/etc/alternatives")
PACKAGES = tuple({sys.base_prefix, sys.prefix, str(Path(envbus.__file__).parent.parent)})
PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"

ENTER = r"""
root=$1 folder=$2 identity=$3 environment=$4; shift 4
mount -t tmpfs -o mode=755 container "$root"
while [ "$1" = tmpfs ]; do
  mkdir -p "$root$2"; mount -t tmpfs -o mode=1777 container "$root$2"; shift 2
done
for path in @programs@; do
  if [ -L "$path" ]; then cp -P "$path" "$root$path"
  elif [ -d "$path" ]; then
    mkdir -p "$root$path"; mount --bind "$path" "$root$path"; mount -o remount,bind,ro "$root$path"
  fi
done
for file in ld.so.cache nsswitch.conf passwd group; do cp "/etc/$file" "$root/etc/$file"; done
mkdir -p "$root/proc" "$root/dev" "$root/srv/envbus"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do
  case $1 in
    folder) mkdir -p "$root$3"; mount --bind "$2" "$root$3"; shift 3 ;;
    file) mkdir -p "$(dirname "$root$3")"; [ -e "$root$3" ] || : > "$root$3"
          mount --bind "$2" "$root$3"; mount -o remount,bind,ro "$root$3"; shift 3 ;;
  esac
done
shift
mount -o remount,ro "$root"
exec chroot "$root" setpriv $identity env --chdir="$folder" -i $environment "$@"
""".replace("@programs@", " ".join((*PROGRAMS, *PACKAGES)))

_ENTERING = ("ip", "unshare", "sh", "chroot", "setpriv", "env")
"""What process 1 is before it is the container's."""


@dataclass(frozen=True, slots=True)
class Image:
    """What a container has of its own: as a compose file or a pod says it, in this machine's programs."""

    user: int
    environment: Mapping[str, str]
    files: Mapping[Path, str] = field(default_factory=dict)
    """Path here → path in the container; read-only."""
    folders: Mapping[Path, str] = field(default_factory=dict)
    """The same for what may be written."""
    tmpfs: Sequence[str] = ()
    folder: str = "/srv/envbus"

    @property
    def identity(self) -> str:
        """Arguments of setpriv: no rights at all, and none to be had."""
        return (
            f"--reuid={self.user} --regid={self.user} --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all"
            " --pdeathsig=KILL"  # with it all that it started ends, too
        )

    @property
    def variables(self) -> str:
        """Arguments of env."""
        given = {"PATH": PATH, **self.environment}
        assert not any(" " in value for value in given.values()), "the shell would take it for two"
        return " ".join(f"{name}={value}" for name, value in given.items())

    @property
    def mounts(self) -> list[str]:
        """Arguments of the script."""
        shell = []
        for path in self.tmpfs:
            shell += ["tmpfs", path]
        for here, there in self.folders.items():
            shell += ["folder", str(here), there]
        for here, there in self.files.items():
            shell += ["file", str(here), there]
        return shell


class Container:
    """One that runs."""

    def __init__(self, image: Image, command: Sequence[str], *, space: str, root: Path) -> None:
        self.image = image
        self.said: Path = root.with_suffix(".log")
        root.mkdir()
        outside = ["ip", "netns", "exec", space, "unshare", "--mount", "--pid", "--fork", "--"]
        entered = ["sh", "-euc", ENTER, "enter", str(root), image.folder, image.identity, image.variables]
        with self.said.open("wb") as said:
            self._process = subprocess.Popen(
                [*outside, *entered, *image.mounts, "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_entered()

    def _wait_until_entered(self) -> None:
        deadline = time.monotonic() + 30
        while not self.has_ended():
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                if self.first.name() not in _ENTERING:
                    return
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    @property
    def first(self) -> psutil.Process:
        """Its process 1."""
        (first,) = psutil.Process(self._process.pid).children()
        return first

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.said.read_text(errors="replace")

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def execute(self, *command: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as health checks are run."""
        target = ["nsenter", "--target", str(self.first.pid), "--mount", "--pid", "--net", "--root", "--"]
        image = self.image
        inside = ["setpriv", *image.identity.split(), "env", f"--chdir={image.folder}", "-i", *image.variables.split()]
        return subprocess.run([*target, *inside, *command], capture_output=True, text=True, timeout=timeout_s)

    def terminate(self) -> None:
        """As a container engine begins to stop it: SIGTERM to process 1."""
        self.first.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code of process 1."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """Leave nothing of it."""
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # it has ended, or never came so far
            self.first.kill()
            self._process.wait(10)
        self._process.kill()
        self._process.wait(10)


class ContainerStage:
    """Containers on one network, where all names of theirs are this address."""

    def __init__(self, folder: Path, *, hosts: Sequence[str]) -> None:
        self._folder = folder
        self._space = f"envbus-{secrets.token_hex(3)}"
        self._started: list[Container] = []
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost " + " ".join(hosts) + "\n")

    def open(self) -> None:
        for arguments in (["netns", "add", self._space], ["-n", self._space, "link", "set", "lo", "up"]):
            subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def run(self, image: Image, command: Sequence[str]) -> Container:
        """Start a container."""
        root = self._folder / f"root{len(self._started)}"
        container = Container(image, command, space=self._space, root=root)
        self._started.append(container)
        return container

    def close(self) -> None:
        for container in self._started:
            container.kill()
        subprocess.run(["ip", "netns", "delete", self._space], capture_output=True)


@contextlib.contextmanager
def container_stage(folder: Path, *, hosts: Sequence[str]) -> Iterator[ContainerStage]:
    """Open a stage; skips the test where namespaces are not allowed."""
    stage = ContainerStage(folder, hosts=hosts)
    try:
        stage.open()
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI") and os.geteuid() == 0:
            raise
        pytest.skip(f"containers need root, ip and Linux namespaces: {error}")
    try:
        yield stage
    finally:
        stage.close()
