"""Passes on to a server's slots how full its memory for results is, and tells its log when no more jobs are taken."""

from __future__ import annotations

import logging

from envbus.notices import Notices
from envbus.server.jobs import Jobs
from envbus.server.slots import Instruction, Slots
from envbus.settings import ServerSettings


class Pressure:
    """Between the jobs of one server, which hold results, and its slots, which take jobs."""

    def __init__(self, jobs: Jobs, slots: Slots, notices: Notices, settings: ServerSettings) -> None:
        self._settings = settings
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
            self._notices.note("short of memory", f"no more jobs are taken until memory is free: {self._taken}", now)
        elif self._was_short and not is_short:
            text = f"memory is free, jobs are taken again: {self._taken}"
            self._notices.note("memory is free", text, now, level=logging.INFO)
        self._was_short = is_short
        return instructions

    @property
    def _taken(self) -> str:
        jobs, settings = self._jobs, self._settings
        results = f"{jobs.held_count:,} {'result waits' if jobs.held_count == 1 else 'results wait'} to be collected"
        return (
            f"{results}, {jobs.held_bytes:,} bytes of {settings.hold_results_bytes:,} "
            f"(ENVBUS_SERVER_HOLD_RESULTS_BYTES), and inputs take {self._slots.inputs_bytes:,} bytes of "
            f"{settings.hold_inputs_bytes:,} (ENVBUS_SERVER_HOLD_INPUTS_BYTES)"
        )
