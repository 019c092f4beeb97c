"""Notices and JobLog: what is written, when, and that no number is lost."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.job_log import JobLog, counted
from envbus.notices import EVERY_S, Notices

log = logging.getLogger("envbus.test_notices")


class Lines(logging.Handler):
    """Keeps what is logged here alone."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def counts(records: list[logging.LogRecord]) -> int:
    return sum(getattr(record, "count", 1) for record in records)


@given(st.lists(st.tuples(st.floats(0, 3 * EVERY_S), st.booleans(), st.booleans())))
def test_every_note_is_in_one_line_and_lines_are_few(steps: list[tuple[float, bool, bool]]) -> None:
    own = logging.Logger("own", logging.WARNING)
    lines = Lines()
    own.addHandler(lines)
    notices, now, noted = Notices(own), 0.0, 0
    for passed_s, is_note, is_tick in steps:
        now += passed_s
        if is_note:
            notices.note("kind", "text", now)
            noted += 1
        if is_tick:
            notices.tick(now)
    notices.close(now)
    assert counts(lines.records) == noted
    assert len(lines.records) <= 3 + 2 * now / EVERY_S


def test_a_window_that_is_over_needs_no_tick(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(log, {"server": "s"})
    for number, now in enumerate((0.0, 1.0, 2.0, EVERY_S, EVERY_S + 1)):
        notices.note("bad", f"bad {number}", now)
    notices.close(EVERY_S + 2)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["bad 0", "bad 2 (the last of 2 such in 10 s)", "bad 4 (the last of 2 such in 2 s)"]
    assert {record.__dict__["server"] for record in caplog.records} == {"s"}


def test_at_debug_each_job_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, log.name)
    jobs = JobLog(log, client="c", env="e")
    for number in range(3):
        jobs.trouble("sent again", f"j{number}", "server s is gone", attempt=2, server=None)
    jobs.close()
    assert [(r.levelname, r.__dict__.get("job"), r.__dict__.get("count")) for r in caplog.records] == [
        ("WARNING", "j0", None),
        ("DEBUG", "j1", None),
        ("DEBUG", "j2", None),
        ("WARNING", None, 2),
    ]
    first = caplog.records[0].__dict__
    assert (first["attempt"], first["client"], first["env"], "server" in first) == (2, "c", "e", False)


def test_steps_are_written_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    jobs = JobLog(log, server="s", env="e")
    caplog.set_level(logging.INFO, log.name)
    jobs.step("accepted", "j", attempt=1)
    assert (jobs.is_detailed, caplog.records) == (False, [])
    caplog.set_level(logging.DEBUG, log.name)
    jobs.step("accepted", "j", attempt=1)
    assert jobs.is_detailed
    assert [(r.getMessage(), r.__dict__["job"], r.__dict__["attempt"]) for r in caplog.records] == [
        ("accepted", "j", 1)
    ]


def test_numbers_in_words() -> None:
    words = {"jobs": "job{s}", "resent": "sent again", "late": "late result{s} dropped"}
    assert counted({"jobs": 12_000, "resent": 0, "late": 1}, words) == "12,000 jobs, 1 late result dropped"
    assert counted({}, words) == ""
