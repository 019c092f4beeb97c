"""A fleet and two trainers on one bus as it is generated: TLS, nkeys, rollouts that outlast what NATS keeps of a
request, results in many parts; and users whose credentials are changed while they are connected."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attacked_bus import ITS, MODES, Access, AttackedBus, becomes, generated, inbox_prefix
from tcp_server import free_port

from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.codec import decode_map, encode
from envbus.bus.embedded import EmbeddedNats
from envbus.provision import certificates
from envbus.provision.access import access_of
from envbus.provision.folder import provision

HERE = Path(__file__).parent
MIB = 2**20
WINDOW_S = 1
"""In which NATS lets a server answer a request, where it is too short; the default is four hours."""
ROLLOUT_S = 2.5
VF_EVAL = "import sys; from envbus.cli.vf_eval import main; sys.exit(main())"
FLEET = """
[bus]
context = "access/contexts/ctl1.json"
server_context = "access/contexts/srv.json"
[controller]
id = "ctl1"
[[env]]
id = "long-env"
name = "long"
args = {{ rollout_s = {rollout_s}, result_bytes = {result_bytes} }}
env_dir_path = ["{envs}"]
replicas = 2
max_concurrent = 8
"""


def write_site(folder: Path, *, accounts: bool, port: int, **limits: int) -> str:
    """Make certificates, credentials and the configuration; returns this."""
    certificates.make(folder / "certs")
    spec = access_of(
        trainers=["alice", "bob"],
        servers=["srv"],
        controllers=["ctl1"],
        accounts=accounts,
        listen={"host": "127.0.0.1", "port": port},
        tls={"certificates": folder / "certs"},
        limits=limits,
    )
    provision(spec, folder / "access")
    return (folder / "access" / "nats.conf").read_text()


@contextmanager
def running(folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command of envbus; ended like by a terminal's Ctrl-C if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


async def test_a_fleet_and_two_trainers_run_vf_eval(tmp_path: Path) -> None:
    """What a server would say on a request's reply subject after WINDOW_S does not get through: results are asked
    for anew, part by part. In both modes at the same time."""
    async with asyncio.TaskGroup() as tasks:
        for mode in MODES:
            (tmp_path / mode).mkdir()
            tasks.create_task(run_vf_eval(tmp_path / mode, accounts=mode == "accounts"))


async def run_vf_eval(folder: Path, *, accounts: bool) -> None:
    port = free_port()
    config = write_site(folder, accounts=accounts, port=port, reply_window_s=WINDOW_S)
    fleet = FLEET.format(rollout_s=ROLLOUT_S, result_bytes=3 * MIB, envs=HERE / "envs")
    (folder / "fleet.toml").write_text(fleet)
    async with EmbeddedNats(port=port, config=config):
        with running(folder, "-m", "envbus", "up", "fleet.toml") as up:
            for ended in await asyncio.gather(*(asyncio.to_thread(vf_eval, folder, user) for user in ("alice", "bob"))):
                assert ended.returncode == 0, ended.stdout + ended.stderr
                found = json.loads(ended.stdout)
                assert (found["num_rollouts"], found["num_failed"], found["avg_reward"]) == (8, 0, 1.0)
            assert up.poll() is None


def vf_eval(folder: Path, user: str) -> subprocess.CompletedProcess[str]:
    variables = {"ENVBUS_CONTEXT": f"access/contexts/{user}.json", "ENVBUS_CLIENT_NO_SERVER_TIMEOUT_S": "60"}
    arguments = ["long-env", "--name", "long", "-n", "4", "-r", "2", "-m", "m", "--json"]
    return subprocess.run(
        [sys.executable, "-P", "-c", VF_EVAL, *arguments],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


async def late_replies(bus: AttackedBus) -> list[bool]:
    """Whether a plain request, and a call of envbus, get their results after more than WINDOW_S."""
    async with bus.serving() as served, bus.client("bob") as client, bus.wire("alice") as alice:
        inbox = f"{inbox_prefix('alice')}.x.1"
        alice.subscribe(inbox)
        item: Any = {"prompt": [], "example_id": 1, "hold": True}
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(client.run_rollout(item, None, "m"))
            alice.publish(ITS.rollout, encode({"model": "m", "input": item}), reply=inbox)
            await becomes(lambda: len(served.env.started) == 2)
            await asyncio.sleep(1.5 * WINDOW_S)  # it is the time itself that matters
            served.env.let_go.set()
        await becomes(lambda: served.counts["done"] == 2)
        async with bus.client("alice") as other:
            await other.info()  # what the server said before is out
        heard = await alice.settle()
        return [any(decode_map(message.data)["ok"] for message in heard), call.result()["reward"] == 1.0]


async def test_how_long_a_request_may_be_answered(mode: str) -> None:
    """After its window no answer comes from another account; calls do not depend on it, a plain request does."""
    long, short = generated(mode), generated(mode, reply_window_s=WINDOW_S)
    async with AttackedBus.opened(long) as one, AttackedBus.opened(short) as other:
        in_time, too_late = await asyncio.gather(late_replies(one), late_replies(other))
    assert in_time == [True, True]
    assert too_late == [mode == "roles", True]


async def test_credentials_are_changed_under_the_connected(mode: str, tmp_path: Path) -> None:
    """NATS is told first, so that server and trainer are refused for a while; with their new seeds they go on where
    they were, and no job is lost."""
    port = free_port()
    spec = access_of(
        trainers=["bob"],
        servers=["srv"],
        accounts=mode == "accounts",
        listen={"host": "127.0.0.1", "port": port},
    )
    provision(spec, tmp_path)
    old = {file: file.read_text() for file in (tmp_path / "users").glob("*.nk")}
    async with EmbeddedNats(port=port, config=(tmp_path / "nats.conf").read_text()) as nats:
        bus = ProvisionedBus(nats, tmp_path)
        async with bus.serving() as served, bus.client("bob") as client:
            held: Any = {"prompt": [], "example_id": 1, "hold": True}
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(client.run_rollout(held, None, "m"))
                await becomes(lambda: bool(served.env.started))
                provision(spec, tmp_path, rotate=["bob", "srv"])
                new = {file: file.read_text() for file in old}
                for file, seed in old.items():
                    file.write_text(seed)
                await bus.use(Access((tmp_path / "nats.conf").read_text(), {}))
                connections = [served.server._bus.connection, client._bus.connection]  # type: ignore[union-attr]
                await becomes(lambda: not any(connection.is_up for connection in connections))
                served.env.let_go.set()
                for file, seed in new.items():
                    file.write_text(seed)
            assert call.result()["reward"] == 1.0
            assert (await client.run_rollout({"prompt": [], "example_id": 2}, None, "m"))["reward"] == 1.0
            assert served.env.started == [1, 2]


class ProvisionedBus(AttackedBus):
    """Its users connect by the contexts in a folder."""

    def __init__(self, nats: EmbeddedNats, folder: Path) -> None:
        super().__init__(nats, Access("", {}))
        self._folder = folder

    def options(self, user: str) -> BusOptions:
        return resolve_bus_options(context=str(self._folder / "contexts" / f"{user}.json"))
