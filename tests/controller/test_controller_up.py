"""``envbus up`` in a process of its own: kills, its own death, adoption, and what it says."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from controller_stage import Fleet, client_of, env_table, kill, operator, pids, rollouts, wait_until

from envbus.bus.control_messages import Scale
from envbus.bus.messages import Failure
from envbus.client import NATSEnvClient
from envbus.errors import EnvironmentCrashedError
from envbus.settings import ClientSettings


async def ended(process: subprocess.Popen[bytes], *, timeout_s: float = 60) -> int:
    return await asyncio.to_thread(process.wait, timeout_s)


async def test_killed_servers_are_replaced_and_no_rollout_is_lost(fleet: Fleet, tmp_path: Path) -> None:
    """Two envs with two servers each. P46: what a killed server had started dies with it, no zombie stays."""
    notes = tmp_path / "notes.txt"
    fleet.write(
        env_table("a", replicas=2, max_concurrent=4, args={"helpers": True, "notes": str(notes)}),
        env_table("b", replicas=2, max_concurrent=4, args={"notes": str(notes)}),
    )
    up = fleet.up()
    async with operator(fleet) as op, client_of(fleet, "a") as a, client_of(fleet, "b") as b:
        first = await op.until_running(4)
        work = asyncio.gather(rollouts(a, 40, sleep_s=0.3), rollouts(b, 40, sleep_s=0.3))
        # Of four slots: so each has ended one.
        await wait_until(
            lambda: notes.exists() and all(notes.read_text().count(f"{pid} start") > 4 for pid in pids(first))
        )
        victims = [next(r for r in first if r.env == name) for name in ("a", "b")]
        for victim in victims:
            kill(victim)
        served_a, served_b = await asyncio.wait_for(work, 90)
        now = await op.until_running(4)
        assert len(set(served_a)) >= 2
        assert len(set(served_b)) >= 2
        assert len(pids(first) & pids(now)) == 2
        assert sorted((r.env, r.slot) for r in now) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        assert [r.restarts for r in now if r.pid not in pids(first)] == [1, 1]
        assert not any(psutil.pid_exists(victim.pid or 0) for victim in victims)
        sleepers = [p for p in fleet.processes() if p.name() == "sleep"]
        assert len(sleepers) == 4, "two helpers for each of the two servers of env a"
        up.terminate()
        assert await ended(up) == 0
    await wait_until(lambda: not fleet.processes(), timeout_s=40, what=lambda: str(fleet.processes()))
    assert re.search(r"a: warning: place \d: server \w+ ended: signal SIGKILL", fleet.said)
    logs = list((tmp_path / "logs" / "one").glob("*/*.log"))
    assert len(logs) == 6, "one file per server and attempt"


async def test_a_killed_controller_leaves_no_server(fleet: Fleet) -> None:
    """Also those that still load."""
    fleet.write(env_table("a", replicas=1), env_table("slow", args={"load_s": 60}))
    up = fleet.up()
    async with operator(fleet) as op:
        await op.until(lambda reports: sorted(r.state for r in reports) == ["running", "starting"])
        await wait_until(lambda: any("loading, says" in f.read_text() for f in fleet.folder.glob("logs/one/slow/*")))
    up.kill()
    await ended(up)
    await wait_until(lambda: not fleet.processes(), timeout_s=40, what=lambda: str(fleet.processes()))


async def test_an_adopting_controller_takes_its_servers_over(fleet: Fleet) -> None:
    """SIGKILL; the next one starts no doubles, replaces what has ended since, and scales down by a drain."""
    table = env_table("a", replicas=3, max_concurrent=2)
    fleet.write(table, adopt=True)
    up = fleet.up()
    async with operator(fleet) as op, client_of(fleet, "a") as a:
        first = await op.until_running(3)
        up.kill()
        await ended(up)
        kill(first[0])
        assert len(await rollouts(a, 8, sleep_s=0.1)) == 8, "they serve without it"
        again = fleet.up()
        second = await op.until_running(3)
        assert len(pids(first[1:]) & pids(second)) == 2
        assert sorted(r.slot for r in second) == [0, 1, 2]
        assert len([p for p in fleet.processes() if "serve" in p.cmdline()]) == 3
        victim = next(r for r in second if r.pid in pids(first))
        kill(victim)
        third = await op.until(
            lambda reports: [r.state for r in reports] == ["running"] * 3 and victim.pid not in pids(reports)
        )
        assert len(pids(second) & pids(third)) == 2
        again.send_signal(signal.SIGHUP)
        assert await ended(again) == 0, "it leaves in order, without its servers"
        assert len([p for p in fleet.processes() if "serve" in p.cmdline()]) == 3
        fleet.write(table | {"replicas": 1}, adopt=False)
        last = fleet.up()
        (left,) = await op.until_running(1)
        assert left.pid in pids(third)
        last.terminate()
        assert await ended(last) == 0
    await wait_until(lambda: not fleet.processes(), timeout_s=40, what=lambda: str(fleet.processes()))


async def test_adopted_servers_of_an_env_that_is_not_wanted_any_more_drain(fleet: Fleet) -> None:
    """Their rollouts end however short the grace; the env cannot be scaled up again."""
    fleet.write(env_table("a", max_concurrent=2, grace=0.1), adopt=True)
    up = fleet.up()
    async with operator(fleet) as op, client_of(fleet, "a") as a:
        (old,) = await op.until_running(1)
        work = asyncio.ensure_future(rollouts(a, 2, sleep_s=10))
        up.send_signal(signal.SIGHUP)
        assert await ended(up) == 0
        fleet.write(env_table("b"), adopt=True)
        again = fleet.up()
        reports = await op.until(lambda reports: [r.state for r in reports if r.env == "a"] == ["draining"])
        assert [env.env for env in (await op.status()).envs] == ["b"]
        answer = await op.ask(Scale(env="a", replicas=1))
        assert isinstance(answer, Failure)
        assert "has no env 'a'; it has: b" in answer.message
        assert await asyncio.wait_for(work, 90) == [old.pid] * 2, "not cut, not run again"
        await op.until(lambda reports: [(r.env, r.state) for r in reports] == [("b", "running")])
        assert {r.pid for r in reports if r.env == "a"} == {old.pid}
        again.terminate()
        assert await ended(again) == 0


async def test_a_waiting_client_is_told_of_a_crash_at_once_and_ends_when_the_env_is_given_up(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """P17: long before its time for servers to appear is over."""
    caplog.set_level(logging.DEBUG, "envbus.client")
    fleet.write(env_table("broken", args={"load": "import error"}))
    settings = ClientSettings(no_server_timeout_s=100)
    async with NATSEnvClient(fleet.address, name="broken", prefix=fleet.prefix, settings=settings) as client:
        waits = [asyncio.ensure_future(client.wait_for_server()), asyncio.ensure_future(rollouts(client, 1))]
        await wait_until(lambda: "refused" in caplog.text)
        up = fleet.up()
        await wait_until(lambda: "ended while loading" in fleet.said)
        crashed = time.monotonic()
        await wait_until(lambda: caplog.text.count("No module named 'foo_bar'") > 1)
        assert time.monotonic() - crashed < 40
        await wait_until(lambda: "given up" in fleet.said)
        given_up = time.monotonic()
        for wait in waits:
            with pytest.raises(EnvironmentCrashedError, match=r"(?s)2 servers in a row.*No module named 'foo_bar'"):
                await asyncio.wait_for(wait, 40)
        assert time.monotonic() - given_up < 40
        up.terminate()
        assert await ended(up) == 0


async def test_a_crash_while_loading_is_told_at_once_and_ends_in_failed(fleet: Fleet) -> None:
    """P17: last lines of the traceback, by the beat and by ``up``; P64: the crash text is in a file per attempt."""
    fleet.write(
        env_table("broken", args={"load": "import error"}),
        env_table("gone", args={"load": "exit"}),
        env_table("fine", args={"load_s": 3}, liveness={"suspect_after_s": 1, "stuck_after_s": 2}),
    )
    up = fleet.up("--json")
    async with operator(fleet) as op:
        reports = await op.until(lambda reports: any(r.last_exit and r.env == "broken" for r in reports))
        broken = next(r for r in reports if r.env == "broken")
        log_file = next(fleet.folder.glob("logs/one/broken/*"))
        assert time.time() - log_file.stat().st_mtime < 20, "told soon after its last words"
        assert broken.last_exit is not None
        assert "exit code 2: error[env_crashed]" in broken.last_exit
        assert "No module named 'foo_bar'" in broken.last_exit
        reports = await op.until(lambda reports: sorted(r.state for r in reports) == ["failed", "failed", "running"])
        status = await op.status()
        failed = {env.env: env.failed for env in status.envs}
        assert failed["fine"] is None, "a slow load is no crash"
        assert "2 servers in a row ended while loading" in str(failed["broken"])
        assert "load_environment raised SystemExit(3)" in str(failed["gone"])
        up.send_signal(signal.SIGINT)
        assert await ended(up) == 0
    said = [json.loads(line) for line in fleet.said.splitlines()]
    assert any(note["env"] == "broken" and "foo_bar" in note["text"] for note in said)
    assert len(list(fleet.folder.glob("logs/one/broken/*"))) == 2
    assert all("loading, says the environment" in f.read_text() for f in fleet.folder.glob("logs/one/broken/*"))


async def test_a_second_signal_cancels_rollouts_but_not_the_teardown(fleet: Fleet, tmp_path: Path) -> None:
    """P20: once and to its end, in all servers at the same time."""
    notes = tmp_path / "notes.txt"
    fleet.write(env_table("a", replicas=2, max_concurrent=1, args={"notes": str(notes), "teardown_s": 1.5}))
    up = fleet.up()
    async with operator(fleet) as op, client_of(fleet, "a") as a:
        await op.until_running(2)
        work = asyncio.ensure_future(rollouts(a, 2, sleep_s=60))
        await wait_until(lambda: notes.exists() and notes.read_text().count("start") == 2)
        up.send_signal(signal.SIGINT)
        await op.until(lambda reports: [r.state for r in reports] == ["draining"] * 2)
        started = time.monotonic()
        up.send_signal(signal.SIGINT)
        assert await ended(up) == 0
        assert time.monotonic() - started < 30
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert notes.read_text().count("teardown begins") == 2
    assert notes.read_text().count("teardown ends") == 2


async def test_a_second_controller_of_the_same_name_is_refused(make_fleet: Callable[..., Fleet]) -> None:
    """P35: two controllers cannot claim one name unnoticed."""
    fleet = make_fleet()
    fleet.write(env_table("a"))
    up = fleet.up()
    async with operator(fleet) as op:
        await op.until_running(1)
        second = fleet.up()
        assert await ended(second) == 2
        assert "a controller named 'one' already runs on host" in fleet.said
        assert len((await op.status()).processes) == 1
        up.terminate()
        assert await ended(up) == 0


def test_a_dry_run_prints_the_plan_and_starts_nothing(fleet: Fleet) -> None:
    fleet.write(env_table("a", replicas=2), env_table("b", autoscale={"min": 1, "max": 4}))
    plan = fleet.up("--dry-run", "--json")
    assert plan.wait(60) == 0
    shown = json.loads(fleet.said)
    assert [(env["env"], env["servers"]) for env in shown["envs"]] == [("a", "2"), ("b", "1 to 4")]
    assert shown["controller"] == "one"
    table = fleet.up("--dry-run")
    assert table.wait(60) == 0
    assert "1 to 4" in fleet.said
    assert not (fleet.folder / "logs").exists()


def test_a_wrong_fleet_file_is_a_usage_error(fleet: Fleet) -> None:
    file = fleet.write(env_table("a", replica=2))
    assert fleet.up().wait(60) == 2
    assert f"error[usage]: {file}:" in fleet.said
    assert "env[0].replica: unknown key" in fleet.said
