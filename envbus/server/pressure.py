"""Passes on to a server's slots how full its memory for results is, and tells its log when no more jobs are taken."""

from __future__ import annotations

from envbus.notices import Notices
from envbus.server.jobs import Jobs
from envbus.server.slots import Instruction, Slots


class Pressure:
    """Between the jobs of one server, which hold results, and its slots, which take jobs."""

    def __init__(self, jobs: Jobs, slots: Slots, notices: Notices) -> None:
        self._jobs = jobs
        self._slots = slots
        self._notices = notices
        self._was_short = False

    def weigh(self, now: float) -> list[Instruction]:
        """Held outcomes came or went: take jobs as their memory allows."""
        jobs, slots = self._jobs, self._slots
        instructions = slots.hold_back(is_full=jobs.is_full, clients=jobs.heavy_clients, now=now)
        is_short = slots.is_short_of_memory
        if is_short and not self._was_short:
            held = f"{jobs.held_count:,} outcomes of {jobs.held_bytes:,} bytes, inputs of {slots.inputs_bytes:,}"
            self._notices.note("short of memory", f"no more jobs are taken until memory is free: {held}", now)
        self._was_short = is_short
        return instructions
