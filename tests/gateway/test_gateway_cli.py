"""``envbus gateway`` as a process: what it prints, its health pages, how it ends, and its usage errors."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from dealers import classic_body, unpack
from stage import Stage, becomes, do

from envbus.http_endpoint import Response

Command = list[str]
EXIT_USAGE = 2


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Gateways; reaped."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def command(stage: Stage, *arguments: str) -> Command:
    envbus = [sys.executable, "-P", "-m", "envbus", "gateway", "--address", stage.url, "--prefix", stage.prefix]
    return [*envbus, *arguments]


def started(arguments: Command) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


def ask(address: str, body: bytes) -> object:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send_multipart([b"1", body])
        assert socket.poll(30_000)
        return unpack(socket.recv_multipart()[1])


def page(port: int, path: str) -> Response:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return Response(answer.read(), answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.read(), error.code)


async def test_gateway_serves_and_ends(
    stage: Stage, processes: list[subprocess.Popen[str]], unused_tcp_port: int
) -> None:
    places = ["--listen", "tcp://127.0.0.1:0", "--env", "stage", "--listen", "tcp://127.0.0.1:0", "--env", "other"]
    processes.append(started(command(stage, *places, "--health", f"127.0.0.1:{unused_tcp_port}")))
    lines = [await line_of(processes[0]) for _ in range(2)]
    assert lines[1].startswith("other is at tcp://127.0.0.1:")
    name, address = lines[0].split(" is at ")
    assert name == "stage"
    assert (await asyncio.to_thread(page, unused_tcp_port, "/livez")).status == 200
    not_ready = await asyncio.to_thread(page, unused_tcp_port, "/readyz")
    assert not_ready.status == 503
    assert [line.split(":")[0] for line in not_ready.body.decode().splitlines()] == ["stage", "other"]
    stage.launch()
    answer = await asyncio.to_thread(ask, address, classic_body(do()))
    assert isinstance(answer, dict)
    assert answer["success"]
    await becomes(lambda: not page(unused_tcp_port, "/readyz").body.startswith(b"stage:"))
    processes[0].send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(processes[0].wait, 30) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--listen", "tcp://127.0.0.1:0"], "Missing option '--env'"),
        (["--listen", "tcp://127.0.0.1:0", "--env", "a", "--env", "b"], "one --env for each --listen"),
        (["--listen", "127.0.0.1:0", "--env", "a"], "cannot listen on '127.0.0.1:0'"),
        (["--listen", "tcp://127.0.0.1:0", "--env", "a", "--health", "8080"], "--health 8080: write it like"),
    ],
)
async def test_usage_errors(
    stage: Stage, processes: list[subprocess.Popen[str]], arguments: list[str], text: str
) -> None:
    processes.append(started(command(stage, *arguments)))
    _, errors = await asyncio.to_thread(processes[0].communicate, timeout=60)
    assert processes[0].returncode == EXIT_USAGE
    assert text in errors


def test_without_pyzmq(stage: Stage, tmp_path: Path) -> None:
    """The rest of envbus does not need it."""
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError('No module named zmq')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from envbus.cli.main import main; sys.exit(main())"
    arguments = [sys.executable, "-c", code, *command(stage, "--listen", "tcp://127.0.0.1:0", "--env", "a")[4:]]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_USAGE
    assert "pip install 'envbus[gateway]'" in done.stderr
