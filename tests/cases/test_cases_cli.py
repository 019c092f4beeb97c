"""The command line over the bus when things fail: what is kept, what is told, and that the process ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import Cli, wait_for_line

ENVS = Path(__file__).parent / "envs"


@contextlib.contextmanager
def served(cli: Cli, *options: str, count: int, **arguments: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """So many servers that are ready; they are stopped as by hand."""
    options = ("serve", "case-env", *options, "--env-dir-path", str(ENVS), "-a", json.dumps(arguments))
    servers = [cli.start(*options) for _ in range(count)]
    try:
        for server in servers:
            wait_for_line(server, "is ready", stream="stderr")
        yield servers
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.communicate(timeout=40)


def rows(cli: Cli) -> list[dict[str, Any]]:
    [file] = cli.folder.glob("outputs/evals/*/*/results.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_three_of_twenty_fail_over_the_bus_and_a_resume_redoes_those(cli: Cli, nats_url: str, prefix: str) -> None:
    """P16: number 7 raises, 9 takes its server with it, 11 cannot be encoded; status and summary say so."""
    trouble, notes = cli.folder / "trouble", cli.folder / "notes.txt"
    trouble.touch()
    where = ("--address", nats_url, "--prefix", prefix, "--name", "case")
    command = ("eval", "case-env", *where, "-n", "20", "-r", "1", "-c", "1", "-s", "--demo-model", "--disable-tui")
    arguments = {"trouble_while": str(trouble), "notes": str(notes)}
    with served(cli, *where, count=2, **arguments) as servers:
        first = cli.run(*command, variables={"ENVBUS_CLIENT_MAX_ATTEMPTS": "1"}, timeout_s=100)
        assert first.code == 1, first.err
        for part in ("3 of 20 failed", "RuntimeError", "ServerLostError", "EncodeError", "over 17 rollouts"):
            assert part in first.out
        failed = {row["example_id"]: row["error"]["error"] for row in rows(cli) if row.get("error")}
        assert failed == {7: "RuntimeError", 9: "ServerLostError", 11: "EncodeError"}
        trouble.unlink()
        ran = len(notes.read_text().splitlines())
        second = cli.run(*command, "-R", timeout_s=100)
        assert second.code == 0, second.err
        assert "20 rollouts to run, 17 kept" in second.out
        assert "0 of 20 failed" in second.out
        again = notes.read_text().splitlines()[ran:]
        assert sorted(int(line.split()[-1]) for line in again if "start" in line) == [7, 9, 11]
    assert sorted(server.returncode for server in servers) == [0, 9]


def test_a_data_set_that_is_absent_is_told_with_its_path(cli: Cli) -> None:
    """P17: soon, with exit code, env id and the last lines of the server's log."""
    missing = str(cli.folder / "no-such-data.parquet")
    ended = cli.run(
        "eval", "case-env", "--env-dir-path", str(ENVS), "--demo-model", "-a", json.dumps({"dataset": missing})
    )
    assert ended.code == 2
    for word in ("case-env", "exit code 2", "FileNotFoundError", missing):
        assert word in ended.err
    cli.wait_all_gone()


@pytest.mark.parametrize("place", ["sidecar", "here"])
def test_an_evaluation_ends_though_its_pools_are_stuck(cli: Cli, place: str) -> None:
    """P65: a stuck thread and a stuck process, a rubric with workers, an HTTP session; soon after the summary."""
    here = ("--disable-env-server",) if place == "here" else ()
    process = cli.start(
        "eval", "pools-env", "--env-dir-path", str(ENVS), "--demo-model", "-n", "1", "-r", "1", "-s", *here
    )
    wait_for_line(process, "ex 0: 1.00")
    out, err = process.communicate(timeout=60)  # what is stuck would take 10 minutes
    assert process.returncode == 0, out + err
    logs = "".join(file.read_text() for file in cli.folder.rglob("*.log"))
    assert (err + logs).count("pools torn down") == 1
    for word in ("Unclosed", "leaked", "never retrieved", "Traceback", "was destroyed"):
        assert word not in err + logs
    cli.wait_all_gone()
