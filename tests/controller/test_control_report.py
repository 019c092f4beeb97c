"""A controller's report of very many servers still fits on one message (pure)."""

from __future__ import annotations

from envbus.bus.control_messages import ControllerBeat, EnvReport, ProcessReport
from envbus.bus.messages import pack, parse
from envbus.controller.control_api import fitting


def report(count: int) -> ControllerBeat:
    reason = "exit code 1: no such file\n" + "    a line of its log\n" * 100
    processes = [
        ProcessReport(server=f"{n:032x}", env="a", slot=n, generation=0, pid=n, state="backoff", last_exit=reason)
        for n in range(count)
    ]
    env = EnvReport(env="a", env_id="a", replicas=count, failed=reason)
    return ControllerBeat(controller="c", host="h", pid=1, version="1", started_at=0, envs=[env], processes=processes)


def test_a_small_report_is_left_as_it_is() -> None:
    assert fitting(report(5), max_bytes=1_000_000) == report(5)


def test_a_large_report_keeps_every_server_and_the_first_line() -> None:
    shown = parse(pack(fitting(report(1000), max_bytes=1_000_000)))
    assert isinstance(shown, ControllerBeat)
    assert len(pack(shown)) < 1_000_000
    assert len(shown.processes) == 1000
    assert {process.last_exit for process in shown.processes} == {"exit code 1: no such file"}
    assert shown.envs[0].failed == "exit code 1: no such file"
