"""How a run ends early, what is left of it, and what others can see of it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_process import ENVS, Cli, wait_for_line

SLOW = ("probe-env", "--env-dir-path", str(ENVS), "--demo-model", "-a", '{"delay_s": 600}', "-n", "1", "-r", "2")
MIXED = ("probe-env", "--env-dir-path", str(ENVS), "--demo-model", "-a", '{"delay_s": 0.2, "size": 300}', "-n", "300")


def started(cli: Cli, *options: str) -> subprocess.Popen[str]:
    process = cli.start("eval", *options)
    wait_for_line(process, "to run")
    return process


def test_ctrl_c_keeps_rows_and_prints_a_partial_summary(cli: Cli) -> None:
    process = started(cli, *MIXED, "-r", "1", "-c", "2", "-s", "-A")
    deadline = time.monotonic() + 60
    while not sum(len(file.read_bytes()) for file in cli.folder.glob("outputs/evals/*/*/results.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "of 300 rollouts were run" in out
    assert "ex 0: 1.00" in out
    [file] = cli.folder.glob("outputs/evals/*/*/results.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["reward"] == 1.0
    assert json.loads(file.with_name("metadata.json").read_text())["num_rollouts"] >= 1
    cli.wait_all_gone()


@pytest.mark.parametrize("place", [(), ("--disable-env-server",)])
def test_ctrl_c_ends_everything(cli: Cli, place: tuple[str, ...]) -> None:
    process = started(cli, *SLOW, *place)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    cli.wait_all_gone()


def test_a_second_ctrl_c_forces(cli: Cli) -> None:
    """Teardown hooks get their time, but not against the user's will."""
    options = [option.replace('"delay_s"', '"mode": "slow_teardown", "delay_s"') for option in SLOW]
    process = started(cli, *options)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "stopping the servers", stream="stderr")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    cli.wait_all_gone()


def test_killing_the_command_leaves_no_server_and_no_bus(cli: Cli) -> None:
    process = started(cli, *SLOW)
    assert len(cli.processes()) >= 3, "the command, a server and a bus"
    process.kill()
    process.communicate()
    cli.wait_all_gone()


def test_a_server_that_dies_in_the_run_is_told(cli: Cli) -> None:
    process = started(cli, *SLOW)
    for server in cli.processes():
        if "serve" in server.cmdline():
            server.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "signal SIGKILL" in err
    assert "is ready" in err, "the end of its log is quoted"
    cli.wait_all_gone()


def test_no_secret_is_in_any_command_line(cli: Cli) -> None:
    """Keys, bus passwords and env args reach servers through their environment only."""
    options = [option for option in SLOW if option != "--demo-model"]
    process = started_with_key(cli, options)
    lines = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in cli.processes() if each.pid != process.pid]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    serving = [line for line in lines if b"serve" in line.split(b"\0")]
    assert len(serving) == 1
    assert b"--allow-key\0*\0" in serving[0]
    assert not any(b"sk-secret" in line or b"delay_s" in line for line in lines)


def started_with_key(cli: Cli, options: list[str]) -> subprocess.Popen[str]:
    process = cli.start(
        "eval", *options, "-b", "http://127.0.0.1:9/v1", "-k", "MY_KEY", variables={"MY_KEY": "sk-secret"}
    )
    wait_for_line(process, "to run")
    return process
