"""``envbus serve`` by hand and ``envbus eval --address``: shared servers on one bus."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable

import pytest
from cli_process import QUICK, Cli, wait_for_line

from envbus.client import NATSEnvClient

Serve = Callable[..., "subprocess.Popen[str]"]
ODD_NAME = "owner/my env.v1@1.2 é"


@pytest.fixture
def fleet(nats_url: str, prefix: str) -> tuple[str, ...]:
    return ("--address", nats_url, "--prefix", prefix, "--demo-model")


async def test_two_servers_share_a_run_under_an_odd_name(
    cli: Cli, serve: Serve, fleet: tuple[str, ...], nats_url: str, prefix: str
) -> None:
    """P56: reachable under exactly its own name. Outputs have the shape of an in-process run."""
    for _ in range(2):
        serve("reverse-text", "--name", ODD_NAME, "--max-concurrent", "4")
    ended = cli.run("eval", "reverse-text", "--name", ODD_NAME, *fleet, "-n", "16", "-r", "3", "--json")
    assert ended.code == 0, ended.err
    async with NATSEnvClient(nats_url, name=ODD_NAME, prefix=prefix) as client:
        await asyncio.sleep(0)
        done = [beat.done for beat in await client.servers()]
    assert len(done) == 2
    assert min(done) > 0
    assert sum(done) == 48
    here = cli.run("eval", "reverse-text", "--demo-model", "--disable-env-server", "-n", "1", "-r", "1", "--json")
    assert json.loads(here.out).keys() == json.loads(ended.out).keys()


def test_absent_env_lists_what_is_there(cli: Cli, serve: Serve, fleet: tuple[str, ...]) -> None:
    """P59: no server, and a typo."""
    serve("reverse-text")
    absent = cli.run("eval", "gsm8k", *fleet, variables=QUICK)
    typo = cli.run("eval", "reverse-txt", *fleet, variables=QUICK)
    assert (absent.code, typo.code) == (2, 2)
    assert "the envs there are: reverse-text" in absent.err
    assert "did you mean 'reverse-text'?" in typo.err


def test_loading_full_and_stopped_servers_are_told_apart(cli: Cli, serve: Serve, fleet: tuple[str, ...]) -> None:
    """P59: still loading waits to a bound, full waits in line, a short gap is bridged."""
    slow = {"mode": "slow_load", "delay_s": 600}
    loading = serve("probe-env", "-a", json.dumps(slow), until="is loading")
    ended = cli.run(
        "eval", "probe-env", "-a", json.dumps(slow), *fleet, variables={"ENVBUS_CLIENT_LOADING_TIMEOUT_S": "1.5"}
    )
    assert ended.code == 2
    assert "still loading" in ended.out
    assert "error[server_loading]" in ended.err
    loading.kill()

    named = ("probe-env", "--name", "probe", *fleet, "-n", "1", "-r", "1")
    only = serve("probe-env", "--name", "probe", "-a", '{"delay_s": 600}', "--max-concurrent", "1")
    first = cli.start("eval", *named)
    wait_for_line(first, "1 rollout to run")
    second = cli.start("eval", *named)
    wait_for_line(second, "full; this run waits in line")
    for process in (first, second):
        process.send_signal(signal.SIGINT)
    for process in (first, second):
        process.communicate(timeout=100)
        assert process.returncode == 130

    only.terminate()
    only.wait(60)
    third = cli.start("eval", *named, variables={"ENVBUS_CLIENT_NO_SERVER_TIMEOUT_S": "120"})
    wait_for_line(third, "no server of env")
    serve("probe-env", "--name", "probe")
    out, err = third.communicate(timeout=100)
    assert third.returncode == 0, out + err


def test_a_server_without_the_key_says_so_per_rollout(cli: Cli, serve: Serve, nats_url: str, prefix: str) -> None:
    """P47: the error names variable and host; nothing is sent to the model."""
    serve("reverse-text")
    ended = cli.run(
        "eval", "reverse-text", "--address", nats_url, "--prefix", prefix, "-n", "1", "-r", "1",
        "-b", "http://127.0.0.1:9/v1", "-k", "MY_LLM_KEY", "--json",
        variables={"MY_LLM_KEY": "sk-secret-of-the-client"},
    )  # fmt: skip
    assert ended.code == 1
    [error] = json.loads(ended.out)["errors"]
    assert error["type"] == "ModelKeyError"
    assert "MY_LLM_KEY" in error["example"]
    assert "--allow-key MY_LLM_KEY=http://127.0.0.1:9" in error["example"]
    assert "sk-secret" not in ended.out + ended.err


def test_serve_stops_with_code_0_on_sigterm_even_while_it_loads(cli: Cli, serve: Serve) -> None:
    ready = serve("reverse-text")
    loading = serve("probe-env", "-a", '{"mode": "slow_load", "delay_s": 600}', until="is loading")
    for process in (ready, loading):
        process.terminate()
        assert process.wait(60) == 0


def test_serve_waits_for_a_bus_that_comes_later(cli: Cli, serve: Serve) -> None:
    """P58: a server that came up first keeps trying, visibly, and stops when told."""
    process = cli.start("serve", "reverse-text", "--address", "nats://127.0.0.1:1")
    wait_for_line(process, "trying again", stream="stderr")
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode == 0
