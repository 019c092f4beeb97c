"""``envbus eval`` as a user runs it: real processes, a real bus, the demo model."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

from cli_process import ENVS, Cli

PROBE = ("probe-env", "--env-dir-path", str(ENVS), "--demo-model", "-A")


def rows_of(folder: Path) -> list[dict[str, object]]:
    [file] = folder.glob("outputs/evals/*/*/results.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_default_flow_prints_every_reward_and_leaves_nothing(cli: Cli) -> None:
    ended = cli.run("eval", "reverse-text", "-n", "5", "-r", "3", "--demo-model", fresh=True)
    assert ended.code == 0, ended.err
    rewards = re.findall(r"^ex \d+: (\d\.\d\d) (\d\.\d\d) (\d\.\d\d)$", ended.out, re.MULTILINE)
    assert len(rewards) == 5
    assert re.search(r"reward +\d\.\d{3} ± \d\.\d{3} over 15 rollouts", ended.out)
    assert "0 of 15 failed" in ended.out
    assert "pass" in ended.out
    assert "user: " in ended.out, "one example is shown"
    assert ended.err == ""
    cli.wait_all_gone()


def test_json_is_one_object_and_all_of_stdout(cli: Cli) -> None:
    ended = cli.run("eval", "owner/reverse-text@1.2.0", "-n", "2", "-r", "2", "--demo-model", "--json", "-w", "2")
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert summary["num_rollouts"] == 4
    assert summary["env_id"] == "owner/reverse-text@1.2.0"
    assert [len(example["rewards"]) for example in summary["rewards"]] == [2, 2]


def test_failed_rollouts_are_told_and_a_resume_redoes_only_them(cli: Cli) -> None:
    """P16: the finished work is kept, exit status and summary say how many failed and why."""
    flag = cli.folder / "fail"
    flag.touch()
    run = ("eval", *PROBE, "-a", json.dumps({"fail_while": str(flag)}), "-n", "3", "-r", "2", "-s")
    first = cli.run(*run)
    assert first.code == 1, first.err
    assert "2 of 6 failed" in first.out
    assert "ScoringError" in first.out
    assert "probe failure" in first.out
    assert "ex 1: failed failed" in first.out
    assert sum(1 for row in rows_of(cli.folder) if row["error"]) == 2

    flag.unlink()
    second = cli.run(*run, "-R")
    assert second.code == 0, second.err + second.out
    assert "6 rollouts to run, 4 kept" in second.out
    assert "0 of 6 failed" in second.out
    assert len(rows_of(cli.folder)) == 8, "the two that failed ran again, as appended rows"


def test_server_logs_go_to_a_file_and_nowhere_else(cli: Cli) -> None:
    """P64: each line once, in the server's file, nothing on the display."""
    ended = cli.run("eval", *PROBE, "-n", "1", "-r", "1", "-s")
    assert ended.code == 0, ended.err
    [log] = cli.folder.glob("outputs/evals/*/*/logs/server.log")
    text = log.read_text()
    for line in ("probe env prints", "probe env logs", "is ready"):
        assert text.count(line) == 1
        assert line not in ended.out + ended.err


def test_live_display_leaves_the_summary_whole(cli: Cli) -> None:
    """P64: on a terminal nothing is drawn over the summary."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        cli.command("eval", *PROBE, "-n", "3", "-r", "2", "--disable-env-server"),
        cwd=cli.folder,
        env=cli.environ({"TERM": "xterm-256color"}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    written = b""
    try:
        while chunk := os.read(master, 65536):
            written += chunk
    except OSError:
        pass  # a terminal that nobody holds any more
    os.close(master)
    assert process.wait(60) == 0
    text = written.decode()
    assert "6/6" in text
    last_block = text.rpartition("\x1b[?25h")[2]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last_block).replace("\r", "")
    assert re.findall(r"^ex \d: 1\.00 1\.00$", plain, re.MULTILINE) == [f"ex {i}: 1.00 1.00" for i in range(3)]
    assert "probe env" not in plain


def test_rollout_timeout_fails_only_the_slow_rollouts(cli: Cli) -> None:
    """P22: a configured limit ends rollouts as failed samples, the eval goes on."""
    ended = cli.run("eval", *PROBE, "-a", '{"delay_s": 60}', "-n", "1", "-r", "2", "--timeout", "0.3", "--json")
    assert ended.code == 1
    summary = json.loads(ended.out)
    assert summary["errors_by_type"] == {"RolloutTimeoutError": 2}
    cli.wait_all_gone()


def test_a_stuck_pool_does_not_hold_up_the_end(cli: Cli) -> None:
    """P65: the process is gone soon after its summary, over the bus and in-process."""
    for place in ((), ("--disable-env-server",)):
        ended = cli.run("eval", *PROBE, "-a", '{"mode": "stuck_pool"}', "-n", "1", "-r", "1", *place, fresh=True)
        assert ended.code == 0, ended.err
        assert ended.seconds < 100, "the stuck job itself would take 10 minutes"
        unexpected = [line for line in ended.err.splitlines() if "probe env logs" not in line]
        assert not unexpected, "nothing about leaked semaphores or tasks"
        cli.wait_all_gone()


def test_extra_env_kwargs_reach_the_sidecar(cli: Cli) -> None:
    ended = cli.run(
        "eval", *PROBE, "-x", '{"timeout_seconds": 0.2}', "-a", '{"delay_s": 60}', "-n", "1", "-r", "1", "--json"
    )
    assert json.loads(ended.out)["errors_by_type"] == {"RolloutTimeoutError": 1}, ended.err
