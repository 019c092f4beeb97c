"""Servers of a controller: what they leave behind, how they stop, what they log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
from controller_stage import Fleet, client_of, env_table, kill, operator, pids, rollouts, running, wait_until

from envbus.bus.control_messages import Restart, Scale

ENVS = Path(__file__).parent / "envs"


async def test_helpers_of_an_env_end_with_their_server(fleet: Fleet, tmp_path: Path) -> None:
    """P46: killed with SIGKILL, replaced by a restart, stopped; a child of a child in a session of its own. No zombie
    stays. P20: an operator's stop runs the teardown of the server that is left, once."""
    notes = tmp_path / "notes.txt"
    spec = fleet.spec(env_table("a", args={"helpers": True, "notes": str(notes), "teardown_s": 0.3}))

    def helpers() -> set[psutil.Process]:
        return {process for process in fleet.processes() if process.name() == "sleep"}

    async with running(fleet, spec) as controller, operator(fleet) as op:
        first = await op.until_running(1)
        old = helpers()
        assert len(old) == 2
        kill(first[0])
        second = await op.until(lambda now: [r.state for r in now] == ["running"] and pids(now) != pids(first))
        await wait_until(lambda: len(helpers()) == 2 and not helpers() & old, timeout_s=30)
        old = helpers()
        await op.ask(Restart(env="a"))
        await op.until(lambda now: [(r.generation, r.state) for r in now] == [(1, "running")])
        await wait_until(lambda: len(helpers()) == 2 and not helpers() & old, timeout_s=30)
        assert not any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
        await op.ask(Scale(env="a", replicas=0))
        await op.until(lambda now: not now)
        await wait_until(lambda: not fleet.processes(), timeout_s=30)
        assert controller is not None
    ended_in_order = notes.read_text().splitlines()
    assert not any(f"{first[0].pid} teardown" in line for line in ended_in_order)
    assert sum(f"{second[0].pid} teardown ends" in line for line in ended_in_order) == 1
    assert sum("teardown ends" in line for line in ended_in_order) == 2


async def test_ctrl_c_in_the_terminal_twice_tears_every_server_down(fleet: Fleet, tmp_path: Path) -> None:
    """P20: the signal goes to the whole process group; a second one comes while the hooks run. Each runs once and to
    its end, at the same time as the others', and nothing prints a traceback."""
    notes = tmp_path / "notes.txt"
    fleet.write(env_table("a", replicas=3, args={"notes": str(notes), "teardown_s": 2}))
    up = fleet.up(inside=["setsid"])
    async with operator(fleet) as op:
        await op.until_running(3)
        os.killpg(up.pid, signal.SIGINT)
        await wait_until(lambda: notes.exists() and notes.read_text().count("teardown begins") == 3)
        assert "teardown ends" not in notes.read_text(), "one after the other"
        os.killpg(up.pid, signal.SIGTERM)
        assert await asyncio.to_thread(up.wait, 30) == 0
    assert notes.read_text().count("teardown begins") == notes.read_text().count("teardown ends") == 3
    logs = [file.read_text() for file in (tmp_path / "logs").rglob("*.log")]
    assert len(logs) == 3
    assert "Traceback" not in "".join([fleet.said, *logs])
    await wait_until(lambda: not fleet.processes(), timeout_s=30)


async def test_logs_of_servers_are_whole_and_apart(fleet: Fleet, tmp_path: Path) -> None:
    """P64: two envs, JSON lines, debug for one of them; a crash keeps its last words and its file."""
    trouble = tmp_path / "trouble"
    trouble.touch()
    case = {"id": "case-env", "env_dir_path": [str(ENVS)]}
    loud = env_table("loud", args={"trouble_while": str(trouble)}, log_level="DEBUG", **case)
    quiet = env_table("quiet", args={}, **case)
    fleet.write(loud, quiet, json_logs=True)
    up = fleet.up()

    def lines(env: str) -> list[list[str]]:
        return [file.read_text().splitlines() for file in sorted(fleet.folder.glob(f"logs/one/{env}/*.log"))]

    async with operator(fleet) as op, client_of(fleet, "loud") as a, client_of(fleet, "quiet") as b:
        first = await op.until_running(2)
        await rollouts(a, 3)
        await rollouts(b, 3)
        call = asyncio.ensure_future(a.run_rollout({"prompt": [], "example_id": 9}, None, "m"))
        now = await op.until(lambda now: any(r.last_exit for r in now))
        trouble.unlink()
        assert (await asyncio.wait_for(call, 60))["reward"] == 1.0
        crashed = next(r for r in now if r.last_exit)
        assert "exit code 9" in str(crashed.last_exit)
        assert "dying words on stderr" in str(crashed.last_exit)
        assert len(await op.until_running(2)) == len(first)
    up.terminate()
    assert await asyncio.to_thread(up.wait, 30) == 0
    (before, after), (calm,) = lines("loud"), lines("quiet")
    for text, times in (("info line of 0", 1), ("debug line of 0", 1), ("is ready", 1), ("dying words on stderr", 1)):
        assert sum(text in line for line in before) == times
    assert sum("info line of 9" in line for line in after) == 1
    assert "dying words" not in "".join(after)
    assert sum("info line of 0" in line for line in calm) == 1
    assert "debug line" not in "".join(calm)
    entries = [json.loads(line) for line in [*before, *after, *calm] if line != "dying words on stderr"]
    assert {entry["level"] for entry in entries} >= {"INFO", "DEBUG"}
    quoted = [line for line in fleet.said.splitlines() if " line of " in line]
    assert all(line.startswith("    ") for line in quoted), "with the crash, and nowhere else"
