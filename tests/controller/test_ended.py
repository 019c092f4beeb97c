"""What is told of a server that has ended: how, why if its last line says so, and the end of its log once (P17)."""

from __future__ import annotations

import pytest

from envbus.controller.instructions import Note
from envbus.controller.processes import Ended, Record

RECORD = Record(
    server="s", env="e", slot=0, generation=0, digest="", pid=1, create_time=0.0, log_file="e.log", launched_at=0.0
)
AT_WORK = "2026-01-01 10:00:00,000 INFO    envbus.server: env 'e' is ready"


@pytest.mark.parametrize(
    ("how", "last", "first"),
    [
        ("signal SIGKILL", AT_WORK, "signal SIGKILL"),
        ("signal SIGSEGV", "Fatal Python error: Segmentation fault", "signal SIGSEGV"),
        ("exit code 3", AT_WORK, "exit code 3"),
        ("exit code 3", '{"time": "2026", "level": "INFO"}', "exit code 3"),
        ("exit code 2", "error[env_crashed]: no foo", "exit code 2: error[env_crashed]: no foo"),
        ("exit code 1", "No module named envbus", "exit code 1: No module named envbus"),
        ("exit code 0", AT_WORK, "exit code 0"),
    ],
)
def test_a_line_of_work_is_no_reason_and_no_line_is_told_twice(how: str, last: str, first: str) -> None:
    ended = Ended(RECORD, how, ("before", last))
    assert ended.summary == first
    assert ended.reason.count(last) == (how != "exit code 0")
    assert ("\n    before" in ended.reason) == (how != "exit code 0")


def test_facts_are_beside_what_is_said_and_before_the_log() -> None:
    note = Note("e", "server s ended: exit code 2: why\n    its log", facts={"pid": 7, "exit": "exit code 2"})
    assert note.line == "server s ended: exit code 2: why [pid=7]\n    its log"
    assert Note("e", "text").line == "text"
