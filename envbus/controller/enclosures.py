"""What is made for one server and cleared away after it: its cgroup and its private folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from envbus.controller import cgroups
from envbus.controller.confinement import account_of, wants_group
from envbus.controller.spec import EnvSpec


@dataclass(frozen=True, slots=True)
class Enclosure:
    """Of one server."""

    cgroup: Path | None = None
    scratch: Path | None = None

    def kill(self) -> None:
        """Kill all that is in its group."""
        if self.cgroup is not None:
            cgroups.kill(self.cgroup)

    def memory_kills(self) -> str:
        """Say that the kernel has killed in it for want of memory; empty if it has not."""
        count, bound_bytes = cgroups.memory_kills(self.cgroup) if self.cgroup is not None else (0, 0)
        if not count:
            return ""
        return f"out of memory: limits.memory is {bound_bytes:,} bytes, and {count} of its processes were killed for it"

    def clear(self) -> list[str]:
        """Remove both when nothing runs in them any more, and return what could not be removed. Takes a while."""
        left = []
        if self.cgroup is not None and not cgroups.remove(self.cgroup):
            left.append(str(self.cgroup))
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            left += [str(self.scratch)] if self.scratch.exists() else []
        return left


class Enclosures:
    """Makes them.

    Args:
        folder: The cgroup folder of the fleet file, if it names one.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._groups: cgroups.Cgroups | None = None

    def make(self, server: str, env: EnvSpec) -> Enclosure:
        """Make what a server of this env needs.

        Raises:
            OSError: Something cannot be made.
            UsageError: The user or the cgroup folder is not there any more.
        """
        scratch = _scratch(server, env) if env.private_tmp else None
        try:
            return Enclosure(self._group(server, env), scratch)
        except BaseException:
            Enclosure(scratch=scratch).clear()
            raise

    def _group(self, server: str, env: EnvSpec) -> Path | None:
        if not wants_group(env, self._folder):
            return None
        if self._groups is None:
            self._groups = cgroups.Cgroups(cgroups.find_folder(self._folder))
        return self._groups.make(server, env.limits)


def _scratch(server: str, env: EnvSpec) -> Path:
    folder = Path(tempfile.gettempdir(), f"envbus-{server}")
    folder.mkdir(mode=0o700)
    if (account := account_of(env)) is not None:
        os.chown(folder, account.uid, account.gid)
    return folder
