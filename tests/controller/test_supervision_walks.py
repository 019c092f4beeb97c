"""Random walks through supervision: whatever happens in whatever order, some things always hold (pure)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from supervision_stage import Host

EVENTS = ("ready", "crash", "drained by an operator", "leavers end", "second", "minute", "silence", "outage")
ORDERS = ("up", "down", "restart")
STEPS = st.lists(st.tuples(st.sampled_from(EVENTS + ORDERS), st.integers(0, 9)), max_size=40)


def capacity(host: Host) -> int:
    return sum(process.state == "ready" for process in host.staying())


def choose(processes: list[Any], number: int) -> list[Any]:
    return [processes[number % len(processes)]] if processes else []


def step(host: Host, event: str, number: int) -> None:
    staying = host.staying()
    match event:
        case "ready":
            host.ready(*[p.server for p in choose([p for p in staying if p.state == "loading"], number)])
        case "crash":
            for process in choose(list(host.processes.values()), number):
                host.end(process.server, "signal SIGKILL")
        case "drained by an operator":
            for process in choose(staying, number):
                process.state = "draining"
                host.beat(process.server)
        case "leavers end":
            for process in list(host.processes.values()):
                if process not in staying or process.state == "draining":
                    host.end(process.server, "exit code 0")
        case "second":
            host.wait(1)
        case "minute":
            host.wait(60)
        case "silence":
            host.wait(70, beating=False)
        case "outage":
            host.env.outage(number)
        case "up" | "down":
            host.obey(host.env.scale(max(0, host.env.replicas + (1 if event == "up" else -1)), host.now))
        case "restart":
            host.obey(host.env.restart(host.now))


def check(host: Host, event: str, capacity_before: int, launches_before: int, failed_before: bool) -> None:
    serving = [process for process in host.staying() if process.state != "draining"]
    assert len(serving) <= host.env.replicas + 1, "a rolling restart has one successor at a time"
    assert max(Counter(process.slot for process in serving).values(), default=0) <= 2
    if event in ("ready", "second", "minute", "restart", "outage"):
        wanted = min(capacity_before, host.env.replicas)
        assert capacity(host) >= wanted, f"{event} cost capacity"
    new = host.launches[launches_before:]
    if event in ("crash", "leavers end", "drained by an operator"):
        assert not new, "restarted without a pause"
    if failed_before and event not in ORDERS:
        assert not new, "launched although given up"
    assert {view.server for view in host.env.views() if view.state not in ("backoff", "failed")} == set(host.processes)


@settings(max_examples=80, deadline=None)
@given(replicas=st.integers(0, 4), random=st.floats(0, 1), steps=STEPS)
def test_walks(replicas: int, random: float, steps: list[tuple[str, int]]) -> None:
    host = Host(replicas=replicas, random=random).start()
    for event, number in steps:
        before = capacity(host), len(host.launches), host.env.failed is not None
        step(host, event, number)
        check(host, event, *before)
    settle(host)


def settle(host: Host) -> None:
    """Once everything goes well again, all is as wanted."""
    host.obey(host.env.scale(host.env.replicas, host.now))
    for _ in range(2 * len(host.processes) + 10):
        host.wait(40)
        host.all_ready()
        step(host, "leavers end", 0)
    assert capacity(host) == host.env.replicas == len(host.processes)
    assert len({process.generation for process in host.processes.values()}) <= 1
    assert sorted({process.slot for process in host.processes.values()}) == sorted(p.slot for p in host.staying())
