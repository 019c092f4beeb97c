"""What of a fleet file keeps a server apart: its user, its limits, its variables, its folders. Description only.

Whether this host can do it is checked in ``confinement``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator

from envbus.controller.policies import Policy

MIN_MEMORY_BYTES = 64 << 20
"""Less, and not even Python starts: then a missing unit is the likelier meaning."""
MAX_MEMORY_BYTES = 1 << 60
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s:=\x00/]+$")]


def _check_size(size: ByteSize, *, least: int) -> None:
    if not least <= size <= MAX_MEMORY_BYTES:
        raise ValueError(f"{size} bytes is no sensible size; give a unit, e.g. '4GiB'")


class Limits(Policy):
    """Table ``[env.limits]``: what one server may use at most. Sizes have a unit: ``"4GiB"``, ``"512MB"``.

    The first four bound a server and all that it starts together, and need cgroup v2. The others are limits of each
    single process (setrlimit).
    """

    memory: ByteSize | None = None
    """Whoever needs more is killed by the kernel."""
    swap: ByteSize = ByteSize(0)
    """Beyond ``memory``."""
    cpus: float | None = Field(None, ge=0.01, le=100_000)
    """CPU time per time: 1.5 is one and a half cores."""
    processes: int | None = Field(None, ge=1, le=1 << 22)
    """Processes and threads."""
    address_space: ByteSize | None = None
    """Of each process, with what it maps and does not use; who asks for more gets a MemoryError."""
    open_files: int | None = Field(None, ge=16, le=1 << 30)
    """Of each process; sockets and pipes count."""
    user_processes: int | None = Field(None, ge=1, le=1 << 22)
    """Processes and threads of the server's user on this host, those of other servers of that user included."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for size in (self.memory, self.address_space):
            if size is not None:
                _check_size(size, least=MIN_MEMORY_BYTES)
        _check_size(self.swap, least=0)
        if "swap" in self.model_fields_set and self.memory is None:
            raise ValueError("swap goes with memory; give memory, too")
        return self

    @property
    def cgroup_controllers(self) -> dict[str, str]:
        """The cgroup controllers that are needed, with the key that needs each."""
        wanted = {"memory": self.memory, "cpus": self.cpus, "processes": self.processes}
        names = {"memory": "memory", "cpus": "cpu", "processes": "pids"}
        return {names[key]: key for key, value in wanted.items() if value is not None}

    @property
    def rlimits(self) -> dict[str, int]:
        """The limits of each process, by key."""
        values = {key: getattr(self, key) for key in ("address_space", "open_files", "user_processes")}
        return {key: int(value) for key, value in values.items() if value is not None}


class Isolation(Policy):
    """The keys of ``[[env]]`` that keep its servers apart from others. Without them they run as the controller does."""

    user: Name | None = None
    """Run as this user (name or number), with its groups, HOME, USER and LOGNAME; its logs are not for other users."""
    groups: list[Name] | None = None
    """Further groups instead of those of the user."""
    inherit: list[Name] | None = None
    """Which of the controller's variables a server gets, besides those of envbus; default: all. Any of ``variables``
    it gets in any case."""
    cwd: Path | None = None
    """Working directory; default: that of the controller."""
    private_tmp: bool = False
    """An empty folder for each server, as TMPDIR, and as working directory without ``cwd``; removed at its end."""
    umask: str | None = Field(None, pattern=r"^0?[0-7]{3}$")
    """Which rights new files do not get, the log included; default: ``"077"`` with ``user``, else the controller's."""
    no_new_privs: bool = False
    """Programs like sudo give a server no other rights (Linux)."""
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _groups_have_a_user(self) -> Self:
        if self.groups is not None and self.user is None:
            raise ValueError("groups go with user; give user, too")
        return self

    @property
    def file_mask(self) -> int | None:
        """The umask; None: that of the controller."""
        text = self.umask or ("077" if self.user is not None else None)
        return int(text, 8) if text is not None else None
