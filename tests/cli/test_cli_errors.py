"""What goes wrong at the start is one line that says what to do, soon."""

from __future__ import annotations

import http.server
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from cli_forks import CliForks
from cli_process import ENVS, QUICK, Cli

DEMO = ("-n", "1", "-r", "1", "--demo-model")
PROBE = ("probe-env", "--env-dir-path", str(ENVS), *DEMO)


def only_error(err: str) -> str:
    lines = [line for line in err.splitlines() if "WARNING" not in line]
    assert len(lines) == 1, err
    assert lines[0].startswith("error[")
    return lines[0]


WRONG = [
    (["eval", "reverse-text"], ["PRIME_API_KEY", "--demo-model"]),
    (["eval", "reverse-text", "-p", "openai"], ["OPENAI_API_KEY", "is not set"]),
    (["eval", "reverse-text", "-p", "nobody"], ["nobody", "openrouter"]),
    (["eval", "reverse-text", "--demo-model", "-b", "http://x/v1"], ["--demo-model", "-b/--api-base-url"]),
    (["eval", "reverse-text", "--address", "nats://h", "-w", "2"], ["--address", "-w/--workers"]),
    (["eval", "reverse-text", "--address", "nats://h", "-x", '{"a": 1}'], ["--address", "-x/--extra-env-kwargs"]),
    (["eval", "reverse-text", "--disable-env-server", "--name", "x"], ["--disable-env-server", "--name"]),
    (["eval", "reverse-text", "-a", "{a: 1}"], ["-a/--env-args", "not JSON"]),
    (["eval", "reverse-text", "-R", "nowhere", "--demo-model"], ["--resume", "nowhere"]),
    (["eval", "reverse-text", "-H"], ["-H", "--help"]),
    (["serve", "reverse-text"], ["--address", "--embedded"]),
    (["serve", "reverse-text", "--embedded", "--allow-key", "X"], ["--allow-key", "VARIABLE=https://host"]),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory, cli_forks: CliForks) -> list[tuple[int, str]]:
    """Code and errors of each of WRONG."""
    environ = {**os.environ, "PRIME_API_KEY": "", "OPENAI_API_KEY": "", "COLUMNS": "200"}
    lines = [arguments for arguments, _ in WRONG]
    done = cli_forks.run(lines, folder=tmp_path_factory.mktemp("wrong"), environ=environ, timeout_s=60)
    return [(code, err) for code, _, err in done]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda number: " ".join(WRONG[number][0][:4]))
def test_wrong_usage_is_one_line(wrong: list[tuple[int, str]], number: int) -> None:
    code, err = wrong[number]
    assert code == 2
    line = only_error(err)
    for word in WRONG[number][1]:
        assert word in line


@pytest.mark.parametrize("place", [(), ("--disable-env-server",)])
def test_unknown_env(cli: Cli, place: tuple[str, ...]) -> None:
    ended = cli.run("eval", "no-such-env", *DEMO, *place)
    assert ended.code == 2
    assert "no environment 'no-such-env'" in only_error(ended.err)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("missing_import", ["exit code 2", "no module foo_bar", "Traceback"]),
        ("os_exit", ["exit code 3", "about to leave"]),
        ("sys_exit", ["exit code 2", "SystemExit(3)"]),
        ("killed", ["signal SIGKILL", "probe env logs"]),
    ],
)
def test_a_crash_while_loading_is_quoted(cli: Cli, mode: str, words: list[str]) -> None:
    """P17: exit code or signal, env id and the last log lines, and not after the time for servers to appear."""
    patient = {"ENVBUS_CLIENT_NO_SERVER_TIMEOUT_S": "600", "ENVBUS_CLIENT_LOADING_TIMEOUT_S": "600"}
    ended = cli.run("eval", *PROBE, "-a", f'{{"mode": "{mode}"}}', variables=patient)
    assert ended.code == 2
    assert ended.seconds < 100, "loading and starting, and then no waiting"
    for word in ("probe-env", *words):
        assert word in ended.err
    cli.wait_all_gone()


@pytest.fixture
def http_port() -> Iterator[int]:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_wrong_addresses_are_named_with_their_reason(cli: Cli, http_port: int) -> None:
    """P58: address and reason, soon."""
    for address, reason in (
        (f"nats://127.0.0.1:{closed_port()}", "connection refused"),
        ("nats://no-such-host.invalid:4222", "does not resolve"),
        (f"nats://127.0.0.1:{http_port}", "not NATS"),
    ):
        ended = cli.run("eval", "reverse-text", *DEMO, "--address", address, variables=QUICK)
        assert ended.code == 2
        line = only_error(ended.err)
        assert reason in line
        assert address.removeprefix("nats://") in line
