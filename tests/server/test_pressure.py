"""What a server's log says when its memory is used up, and when it is free again (P33)."""

from __future__ import annotations

import logging

import pytest

from envbus.notices import Notices
from envbus.server.jobs import Job, Jobs, LeaseLimits
from envbus.server.pressure import Pressure
from envbus.server.slots import Slots
from envbus.settings import ServerSettings

log = logging.getLogger("envbus.server.pressure_test")


def test_the_log_says_whats_used_up_by_which_setting_and_when_jobs_are_taken_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, log.name)
    settings = ServerSettings(hold_results_bytes=3_000_000)
    limits = LeaseLimits(
        probe_after_s=3, orphan_grace_s=10, orphan_timeout_s=300, hold_results_s=600, hold_results_bytes=3_000_000
    )
    jobs, slots = Jobs(limits), Slots(2, grant_ttl_s=2, wait_ttl_s=10)
    pressure = Pressure(jobs, slots, Notices(log), settings)
    jobs.add(Job("j", "c", 1, 1, "reply", 0.0), 0.0)
    jobs.finish("j", object(), size_bytes=3_012_231, is_failure=False, now=0.0)  # type: ignore[arg-type]
    for _ in range(2):
        pressure.weigh(0.0)
    jobs.release(["j"], "c")
    for _ in range(2):
        pressure.weigh(1.0)
    first, second = caplog.records
    assert first.levelno == logging.WARNING
    assert first.getMessage() == (
        "no more jobs are taken until memory is free: 1 result waits to be collected, 3,012,231 bytes of 3,000,000 "
        "(ENVBUS_SERVER_HOLD_RESULTS_BYTES), and inputs take 0 bytes of 2,147,483,648 (ENVBUS_SERVER_HOLD_INPUTS_BYTES)"
    )
    assert second.levelno == logging.INFO
    assert "jobs are taken again: 0 results wait" in second.getMessage()
