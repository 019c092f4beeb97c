"""A controller in this process with real servers: scaling, restarts, outages, stuck servers, its control API."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from controller_stage import (
    Fleet,
    client_of,
    env_table,
    kill,
    operator,
    pids,
    rollouts,
    running,
    steady_rollouts,
    wait_until,
)

from envbus.bus.control_messages import ControllerBeat, LogLines, LogsRequest, Restart, Scale, StopController
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Failure, Ok, pack
from envbus.bus.subjects import controller as controller_subject
from envbus.bus.subjects import controller_beat
from envbus.client import NATSEnvClient
from envbus.controller.controller import Controller
from envbus.errors import UsageError
from envbus.settings import ClientSettings

QUICK_DOUBT = {"suspect_after_s": 1, "stuck_after_s": 2.5, "kill_after_s": 1}
OUTAGE_S = 3.0
"""Longer than any of these."""


async def started(notes: Path, count: int) -> None:
    """Until so many rollouts have begun."""
    await wait_until(lambda: notes.exists() and notes.read_text().count("start") >= count)


async def test_scale_and_rolling_restart_under_load_lose_nothing(fleet: Fleet) -> None:
    """P19. Up, down by draining, all replaced one by one: every rollout ends, and none is cut by the short grace."""
    spec = fleet.spec(env_table("a", replicas=2, max_concurrent=2, grace=0.1))
    async with running(fleet, spec), operator(fleet) as op, client_of(fleet, "a") as a:
        first = await op.until_running(2)
        enough = asyncio.Event()
        work = asyncio.ensure_future(steady_rollouts(a, enough, at_once=8, sleep_s=0.4))
        assert isinstance(await op.ask(Scale(env="a", replicas=3)), Ok)
        await op.until_running(3)
        assert isinstance(await op.ask(Restart(env="a")), Ok)
        await op.until(lambda rs: all(r.generation == 1 and r.state == "running" for r in rs) and len(rs) == 3)
        assert isinstance(await op.ask(Scale(env="a", replicas=1)), Ok)
        (last,) = await op.until_running(1)
        await rollouts(a, 1)
        enough.set()
        served = await asyncio.wait_for(work, 90)
        assert {last.pid, *pids(first)} <= served
        session = a._session
        assert session is not None
        assert session.counts["resent"] == 0, "nothing had to run twice"


async def test_neither_a_busy_loop_nor_an_outage_is_death(
    make_fleet: Callable[..., Fleet], own_nats: EmbeddedNats
) -> None:
    """P08, P10, P24: limits far shorter than both; the servers stay the same, the rollouts end, and ran once."""
    fleet = make_fleet(address=own_nats.url)
    notes = fleet.folder / "notes.txt"
    spec = fleet.spec(env_table("a", replicas=2, max_concurrent=2, liveness=QUICK_DOUBT, args={"notes": str(notes)}))
    async with running(fleet, spec), operator(fleet) as op, client_of(fleet, "a") as a:
        first = await op.until_running(2)
        await rollouts(a, 4, busy_s=2)
        assert notes.read_text().count("start") == 4
        work = asyncio.ensure_future(rollouts(a, 2, sleep_s=4))
        await started(notes, 6)
        await own_nats.kill()
        await asyncio.sleep(OUTAGE_S)
        await own_nats.restart()
        await asyncio.wait_for(work, 90)
        now = await op.until_running(2)
        assert pids(now) == pids(first)
        assert not any("stuck" in note.text for note in fleet.notes)


async def test_a_server_that_stands_still_is_replaced(fleet: Fleet) -> None:
    """Suspect, asked, stuck, killed; its rollout runs elsewhere."""
    notes = fleet.folder / "notes.txt"
    spec = fleet.spec(env_table("a", max_concurrent=2, liveness=QUICK_DOUBT, args={"notes": str(notes)}))
    async with running(fleet, spec), operator(fleet) as op, client_of(fleet, "a") as a:
        (victim,) = await op.until_running(1)
        work = asyncio.ensure_future(rollouts(a, 2, sleep_s=1))
        await started(notes, 2)
        kill(victim, signal.SIGSTOP)
        await op.until(lambda reports: reports[0].state == "suspect")
        await op.until(lambda reports: reports[0].state == "stuck")
        assert victim.pid not in await asyncio.wait_for(work, 90)
        (now,) = await op.until_running(1)
        assert "no heartbeat for" in (now.last_exit or "")


async def test_clients_hear_of_an_end_at_once(fleet: Fleet) -> None:
    """The controller tells them: they need not wait for their next check."""
    notes = fleet.folder / "notes.txt"
    spec = fleet.spec(env_table("a", replicas=2, max_concurrent=2, args={"notes": str(notes)}))
    settings = ClientSettings(check_interval_s=60, stall_timeout_s=60)
    async with (
        running(fleet, spec),
        operator(fleet) as op,
        NATSEnvClient(fleet.address, name="a", prefix=fleet.prefix, settings=settings) as a,
    ):
        first = await op.until_running(2)
        await rollouts(a, 1)  # its first round of checks is over
        work = asyncio.ensure_future(rollouts(a, 4, sleep_s=1.5))
        await started(notes, 5)
        kill(first[0])
        killed = time.monotonic()
        await asyncio.wait_for(work, 50)
        assert time.monotonic() - killed < 40
    (note,) = [note for note in fleet.notes if f"server {first[0].server[:8]} ended: signal SIGKILL" in note.text]
    assert note.server == first[0].server
    assert (note.facts["pid"], note.facts["exit"]) == (first[0].pid, "signal SIGKILL")
    assert 0 <= note.facts["in_flight"] <= 2, "as its last heartbeat said"
    assert f" [pid={first[0].pid} in_flight=" in note.line.splitlines()[0]


async def test_two_controllers_share_a_bus_and_an_env(make_fleet: Callable[..., Fleet]) -> None:
    """Each runs and ends its own servers only; both serve the same queue."""
    one, two = make_fleet("one"), make_fleet("two")
    async with (
        operator(one) as op_one,
        operator(two) as op_two,
        client_of(one, "a") as a,
        running(one, one.spec(env_table("a", max_concurrent=1))),
    ):
        async with running(two, two.spec(env_table("a", max_concurrent=1, python=sys.executable))):
            theirs = await op_two.until_running(1)
            mine = await op_one.until_running(1)
            assert set(await rollouts(a, 6, sleep_s=0.2)) == pids(mine) | pids(theirs)
            await op_two.ask(Scale(env="a", replicas=0))
            await op_two.until(lambda reports: not reports)
        assert pids(await op_one.until_running(1)) == pids(mine)


async def test_another_configuration_under_the_same_name_is_noticed(make_fleet: Callable[..., Fleet]) -> None:
    """P35."""
    one, two = make_fleet("one"), make_fleet("two")
    async with running(one, one.spec(env_table("a"))), operator(one) as op:
        await op.until_running(1)
        async with running(two, two.spec(env_table("a", args={"teardown_s": 0.1}))):
            await wait_until(lambda: any("controller two on host" in note.text for note in one.notes))


async def test_of_two_controllers_with_one_name_the_younger_ends(fleet: Fleet) -> None:
    """P35: both claimed it while they could not hear each other."""
    spec = fleet.spec(env_table("a"))
    task = asyncio.create_task(Controller(spec, tell=fleet.notes.append).run())
    async with operator(fleet) as op:
        await op.until_running(1)
        mine = await op.status()
        older = ControllerBeat(controller="one", host="elsewhere", pid=1, version="0", started_at=mine.started_at - 60)
        subject = controller_subject("one", fleet.prefix)
        await op.connection.subscribe(subject, lambda asked: op.connection.send(asked.reply, pack(older)))
        await op.connection.publish(controller_beat("one", fleet.prefix), pack(older))
        with pytest.raises(UsageError, match="already runs on host elsewhere"):
            await asyncio.wait_for(task, 60)
    assert not [process for process in fleet.processes() if "serve" in process.cmdline()]


async def test_the_control_api_answers_and_refuses(fleet: Fleet) -> None:
    """P64: a server's log is read over the bus, by offset."""
    spec = fleet.spec(env_table("a"), env_table("auto", autoscale={"min": 1, "max": 2}), json_logs=True)
    async with operator(fleet) as op:
        task = asyncio.create_task(Controller(spec, tell=fleet.notes.append).run())
        reports = await op.until_running(2)
        one = next(report for report in reports if report.env == "a")
        logs = await op.ask(LogsRequest(server=one.server[:8]))
        assert isinstance(logs, LogLines)
        assert logs.server == one.server
        assert logs.lines.count("loading, says the environment") == 1
        assert any('"level": "INFO"' in line for line in logs.lines)
        assert await op.ask(LogsRequest(server=one.server, after=logs.next)) == LogLines(
            server=one.server, lines=[], next=logs.next
        )
        refusals = [
            (LogsRequest(server="zz"), "no server with an id that begins with 'zz'"),
            (Scale(env="b", replicas=1), "has no env 'b'; it has: a, auto"),
            (Scale(env="auto", replicas=1), "env auto scales itself"),
        ]
        for request, expected in refusals:
            answer = await op.ask(request)
            assert isinstance(answer, Failure)
            assert expected in answer.message
        assert isinstance(await op.ask(StopController()), Ok)
        await asyncio.wait_for(task, 60)
    assert not fleet.processes()


async def test_autoscale_follows_the_waiting_line(fleet: Fleet) -> None:
    """Up at once when jobs wait, down again by draining."""
    scale = {"min": 1, "max": 3, "clear_within_s": 1, "down_after_s": 2, "down_step_s": 1}
    spec = fleet.spec(env_table("a", max_concurrent=2, autoscale=scale))
    async with running(fleet, spec), operator(fleet) as op, client_of(fleet, "a") as a:
        await op.until_running(1)
        enough = asyncio.Event()
        work = asyncio.ensure_future(steady_rollouts(a, enough, at_once=12, sleep_s=0.5))
        three = pids(await op.until_running(3))
        served = set(await rollouts(a, 12, sleep_s=0.5))
        enough.set()
        assert served | await asyncio.wait_for(work, 90) == three
        await op.until_running(1)


async def test_a_command_may_run_the_server_as_its_child(fleet: Fleet) -> None:
    """As launchers of virtual environments do; the server is known by its id, not by its process."""
    launcher = """trap 'kill -TERM $server' TERM; "$0" "$@" & server=$!; wait $server; wait $server"""
    command = ["/bin/sh", "-c", launcher, sys.executable, "-P", "-m", "envbus"]
    spec = fleet.spec(env_table("a", max_concurrent=1, command=command, grace=5, log_dir="logs of a"))
    async with running(fleet, spec), operator(fleet) as op, client_of(fleet, "a") as a:
        (report,) = await op.until_running(1)
        assert await rollouts(a, 1) != [report.pid]
        await op.ask(Restart(env="a"))
        await op.until(lambda reports: [(r.generation, r.state) for r in reports] == [(1, "running")])
        await rollouts(a, 1)
        assert len(list((fleet.folder / "logs of a").glob("0-*.log"))) == 2


async def test_a_program_that_cannot_be_started_is_a_crash_while_loading(fleet: Fleet) -> None:
    spec = fleet.spec(env_table("a", python="/no/such/python"))
    async with running(fleet, spec), operator(fleet) as op:
        (report,) = await op.until(lambda reports: [r.state for r in reports] == ["failed"])
        assert "cannot be started" in (report.last_exit or "")


async def test_an_embedded_bus_with_its_ports(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        '[bus]\nembedded = true\nwebsocket_port = 0\nmonitoring_port = 0\n[[env]]\nid = "x"\nreplicas = 0\n'
    )
    from envbus.controller.spec import read_fleet_file

    notes: list[str] = []
    one = Controller(read_fleet_file(file), tell=lambda note: notes.append(note.text))
    task = asyncio.create_task(one.run())
    await wait_until(lambda: len(notes) >= 2)
    assert one._bus.nats is not None
    assert {"nats", "websocket", "monitoring"} <= one._bus.nats.ports.keys()
    await one._bus.nats.kill()
    await wait_until(
        lambda: any("started again" in note for note in notes) and one._bus.nats and one._bus.nats.is_running
    )
    one.stop()
    await asyncio.wait_for(task, 60)
