"""Servers and clients that die under a gateway: every request is answered, or nobody is left who waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dealers import Dealers, assembled, classic_body, gateway, new_id, pack, task_body, unpack
from stage import HERE, Stage, becomes, do

from envbus.adapters.gateway.limits import GatewayLimits

SILENT_CLIENT = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
for number, body in enumerate(sys.argv[2:]):
    socket.send_multipart([b"%d" % number, bytes.fromhex(body)])
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def clients() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Client processes; reaped."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=20)


def silent_client(address: str, *bodies: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SILENT_CLIENT, address, *(body.hex() for body in bodies)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE)


async def test_killed_server_under_50_rollouts(stage: Stage, dealers: Dealers) -> None:
    """All are answered; those of the other server run once."""
    servers = [stage.launch(max_concurrent=25) for _ in range(2)]
    await stage.ready()
    items = [do("slow_then", t=3, t_again=0) for _ in range(50)]
    async with gateway(stage) as running:
        client = dealers.connect(running)
        for item in items:
            await client.send(item["example_id"].encode(), classic_body(item))
        for item in items:
            await stage.event("start", item["example_id"], timeout_s=60)
        servers[0].kill()
        started = {entry["example_id"] for entry in stage.events("start") if entry["pid"] == servers[0].pid}
        lost = started - {entry["example_id"] for entry in stage.events("end") if entry["pid"] == servers[0].pid}
        for item in items:
            answer = await client.answer(item["example_id"].encode())
            assert answer["success"]
            assert answer["output"]["example_id"] == item["example_id"]
    assert lost
    for item in items:
        if item["example_id"] not in started:
            assert len(stage.events("start", example_id=item["example_id"])) == 1


async def test_killed_server_under_a_stream(stage: Stage, dealers: Dealers) -> None:
    """What the lost attempt streamed is discarded before anything comes of the next."""
    stage.launch(env_id="episode-env")
    stage.launch(env_id="episode-env")
    await stage.ready()
    async with gateway(stage) as running:
        client = dealers.connect(running)
        await client.send(b"1", b"run", task_body(idx="t", turns=4, t=600))
        deltas = [unpack((await client.message(b"1"))[-1])]
        stage.server_of(await stage.event("start", "t")).kill()
        deltas += [unpack((await client.message(b"1"))[-1]) for _ in range(2)]
        await client.send(b"2", b"cancel", pack({"request_id": "1"}))
        assert (await client.answer(b"2"))["cancelled"]
    assert [delta["trace"] for delta in deltas] == ["t-1", "t-1", "t-2"]
    assert deltas[1] == {"trace": "t-1", "discard": True}


async def test_env_that_ends_its_process_in_the_middle_of_a_stream(stage: Stage, dealers: Dealers) -> None:
    for _ in range(2):
        stage.launch(env_id="episode-env")
    await stage.ready()
    async with gateway(stage) as running:
        client = dealers.connect(running)
        await client.send(b"1", b"run", task_body(idx="t", turns=4, t=0.01, exit_after=1, exit_delay_s=1))
        deltas, reply = await client.episode(b"1")
    assert reply["success"]
    assert {"trace": "t-1", "discard": True} in deltas
    assert assembled(deltas) == {"t-2": [{"turn": turn} for turn in range(4)]}


async def test_env_that_ends_its_process(stage: Stage, dealers: Dealers) -> None:
    for _ in range(2):
        stage.launch(env_id="episode-env")
    await stage.ready()
    async with gateway(stage) as running:
        client = dealers.connect(running)
        answer = await client.rollout(do("exit_process"))
        assert answer["success"]
        assert answer["output"]["reward"] == 1.0


async def test_an_env_that_blocks_holds_up_no_neighbours(stage: Stage, dealers: Dealers, tmp_path: Path) -> None:
    """Its server answers checks from another thread, so its rollout ends well too."""
    for _ in range(2):
        stage.launch(max_concurrent=1)
    await stage.ready()
    async with gateway(stage) as running:
        client = dealers.connect(running)
        hold = tmp_path / "hold"
        hold.touch()
        blocked = do("block", **{"while": str(hold)})
        await client.send(b"blocked", classic_body(blocked))
        entry = await stage.event("start", blocked["example_id"])
        for _ in range(5):
            answer = await client.rollout(do())
            assert answer["output"]["pid"] != entry["pid"]
            await client.send(b"health", b"ping")
            assert (await client.answer(b"health"))["success"]
        hold.unlink()
        assert (await client.answer(b"blocked"))["output"]["pid"] == entry["pid"]


async def test_killed_client(stage: Stage, dealers: Dealers, clients: list[subprocess.Popen[bytes]]) -> None:
    stage.launch()
    await stage.ready()
    item, task = do(t=600), new_id().decode()
    async with gateway(stage) as running:
        clients.append(silent_client(running.listeners[0].address, classic_body(item)))
        await stage.event("start", item["example_id"])
        clients[0].kill()
        await stage.event("cancelled", item["example_id"])
        assert (await dealers.connect(running).rollout(do(example_id=task)))["success"]


async def test_a_client_whose_host_is_silent(
    stage: Stage, dealers: Dealers, clients: list[subprocess.Popen[bytes]]
) -> None:
    """A stopped process answers no heartbeat, as a host that lost its power."""
    stage.launch()
    await stage.ready()
    item = do(t=600)
    async with gateway(stage, limits=GatewayLimits(silence_s=1)) as running:
        clients.append(silent_client(running.listeners[0].address, classic_body(item)))
        await stage.event("start", item["example_id"])
        clients[0].send_signal(signal.SIGSTOP)
        await stage.event("cancelled", item["example_id"])


async def test_health_is_that_of_the_fleet(stage: Stage, dealers: Dealers, caplog: pytest.LogCaptureFixture) -> None:
    """The classic client is told of trouble, and the log; the new one gets no answer until there is none."""
    async with gateway(stage) as running:
        client = dealers.connect(running)
        await client.send(b"health", b"ping")
        answer = await client.answer(b"health")
        assert not answer["success"]
        assert "stage" in answer["error"]
        assert list(running.troubles()) == ["stage"]
        await client.send(b"new", b"health", pack({}))
        await client.send(b"job", classic_body(do()))
        server = stage.launch()
        assert (await client.answer(b"job"))["success"]
        await becomes(lambda: not running.troubles())
        await client.send(b"new2", b"health", pack({}))
        assert (await client.receive())[0] == b"new2"
        server.kill()
        await becomes(lambda: bool(running.troubles()), timeout_s=30)
        await client.send(b"health", b"ping")
        assert not (await client.answer(b"health"))["success"]
    said = [record.getMessage() for record in caplog.records if record.name == "envbus.gateway"]
    assert [line.split(":")[0] for line in said] == [
        "requests for env stage wait",
        "env stage takes rollouts",
        "requests for env stage wait",
    ]
