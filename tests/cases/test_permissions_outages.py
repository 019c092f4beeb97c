"""What may be answered to ends with a connection: nothing that runs is lost of it, nor with credentials that change.

nats-server forgets at every reconnect which replies a user may still give, and between accounts where they go.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import nkeys
import pytest
from permission_stage import (
    MODES,
    Ticking,
    as_user,
    call,
    calling,
    connected,
    fleet_file,
    one_account,
    reconnect,
    reload,
    serving,
    ticks,
    user,
    write_context,
)
from stage import becomes

from envbus.bus import dialer
from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.control_messages import ControllerBeat
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import pack
from envbus.bus.subjects import controller, controller_beat
from envbus.cli import up_command
from envbus.client import inquiries, transfers
from envbus.controller import control_api
from envbus.controller.controller import Controller
from envbus.controller.instructions import Note
from envbus.controller.spec import read_fleet_file
from envbus.errors import BusAuthError, CallTimeoutError, UsageError
from envbus.server import reception
from envbus.server.jobs import Jobs

LONG_S = 20.0
MANY = 10_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections come back soon."""
    monkeypatch.setattr(dialer, "RECONNECT_MAX_S", 0.3)


@pytest.mark.parametrize("mode", MODES)
async def test_progress_goes_on_after_a_reconnect(mode: str) -> None:
    """P10, P53: of the server, of the client, and of both as NATS restarts; nothing of it is lost, and the result is
    collected."""
    environment = Ticking()
    async with (
        EmbeddedNats(config=MODES[mode]()) as nats,
        serving(as_user(nats, "srv"), environment) as server,
        calling(as_user(nats, "alice")) as client,
    ):
        reports: list[int] = []
        running = asyncio.create_task(call(client, ticks(MANY), reports))
        await environment.started.wait()
        for lose in (lambda: reconnect(server), lambda: reconnect(client), nats.kill):
            seen = len(reports)
            await lose()
            if not nats.is_running:
                await nats.restart()
            await becomes(lambda seen=seen: len(reports) > seen + 1, what="more progress")  # type: ignore[misc]
        environment.enough = True
        await asyncio.wait_for(running, LONG_S)
        assert reports == list(range(len(reports)))
        assert client.stats()["resent"] == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_rollout_may_last_longer_than_the_leave_to_answer(mode: str) -> None:
    """P53: with limits of a second: what would ride on the job's reply subject is pulled."""
    async with (
        EmbeddedNats(config=MODES[mode](expires="1s")) as nats,
        serving(as_user(nats, "srv")),
        calling(as_user(nats, "alice")) as client,
    ):
        reports: list[int] = []
        small, large = await asyncio.wait_for(
            asyncio.gather(call(client, ticks(30), reports), call(client, ticks(30, size=600_000))), LONG_S
        )
        assert (len(small["blob"]), len(large["blob"])) == (0, 600_000)
        assert reports == list(range(30))
        assert client.stats()["resent"] == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_waiting_job_gets_its_turn_after_a_reconnect(mode: str) -> None:
    """P53: a grant goes to where the client said last that it waits."""
    environment = Ticking()
    async with (
        EmbeddedNats(config=MODES[mode]()) as nats,
        serving(as_user(nats, "srv"), environment, max_concurrent=1, grant_ttl_s=0.3) as server,
        calling(as_user(nats, "alice")) as client,
    ):
        first = asyncio.create_task(call(client, ticks(MANY)))
        await environment.started.wait()
        second = asyncio.create_task(call(client, ticks(0)))
        await becomes(lambda: len(server._desks.reception.slots.line) == 1)
        await reconnect(server)
        environment.enough = True
        await asyncio.wait_for(asyncio.gather(first, second), LONG_S)


@pytest.mark.parametrize("mode", MODES)
async def test_a_probe_that_finds_nobody_is_no_death(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P07, P53: a client that says nothing for a while keeps its jobs: that the server may not ask it any more, or
    that the way between two accounts has ended, says nothing of the client."""
    monkeypatch.setattr(reception, "return_after_s", lambda outage_s: 0.0)
    probes: list[bool] = []
    note = Jobs.probe_answered

    def counted(jobs: Jobs, client: str, *, gone: bool, now: float) -> None:
        probes.append(gone)
        note(jobs, client, gone=gone, now=now)

    monkeypatch.setattr(Jobs, "probe_answered", counted)
    environment, config = Ticking(), MODES[mode]()
    if mode == "accounts":  # a user without limits: there NATS answers 503 where the way has ended
        config = config.replace(user("srv"), "{user: srv, password: x}")
    async with (
        EmbeddedNats(config=config) as nats,
        serving(as_user(nats, "srv"), environment, probe_after_s=0.1, orphan_grace_s=0.2) as server,
        calling(as_user(nats, "alice")) as client,
    ):
        await client.wait_for_server(timeout_s=LONG_S)
        await client.connect()
        assert client._session is not None
        checks = client._session._checks
        monkeypatch.setattr(checks, "tick", lambda now: None)
        running = asyncio.create_task(call(client, ticks(MANY)))
        await environment.started.wait()
        await nats.kill()
        await nats.restart()
        await becomes(lambda: server._bus.connection.is_up and client.is_connected)
        probes.clear()
        await becomes(lambda: len(probes) >= 5, what="probes for longer than the grace")
        assert server._desks.reception.counts["orphaned"] == 0
        environment.enough = True
        monkeypatch.setattr(checks, "tick", type(checks).tick.__get__(checks))
        await asyncio.wait_for(running, LONG_S)
        assert client.stats()["resent"] == 0


def new_key(file: Path) -> str:
    """Make a user's key, of which the seed goes to a file; returns the public one."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(seed)
    return str(nkeys.from_seed(bytearray(seed)).public_key.decode())


class Rotation:
    """Users srv and alice with credentials of one kind: NATS's configuration before and after they change."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self.before = self.after = one_account()
        for name in ("srv", "alice"):
            given, now, then = f"user: {name}, password: x", f"user: {name}, password: x", f"user: {name}, password: y"
            if kind == "nkey":
                now = f"nkey: {new_key(folder / 'contexts' / f'{name}.nk')}"
                then = f"nkey: {new_key(folder / f'{name}.nk')}"
            self.before, self.after = self.before.replace(given, now), self.after.replace(given, then)

    def options(self, url: str, name: str) -> BusOptions:
        return resolve_bus_options(context=str(self._write(url, name, "x")))

    def _write(self, url: str, name: str, password: str) -> Path:
        by_password = f'"user": "{name}", "password": "{password}"'
        credentials = f'"nkey": "{name}.nk"' if self._kind == "nkey" else by_password
        return write_context(self._folder, url, name, credentials=credentials)

    def renew(self, url: str) -> None:
        """Give the users what NATS has by now."""
        for name in ("srv", "alice"):
            if self._kind == "nkey":
                (self._folder / f"{name}.nk").rename(self._folder / "contexts" / f"{name}.nk")
            else:
                self._write(url, name, "y")


@pytest.mark.parametrize("kind", ["nkey", "password"])
async def test_credentials_that_change_end_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10, P53: NATS gets new ones by a reload, server and client find theirs renewed a while later; meanwhile calls
    end with an error that says so, the log does in a few lines, and what runs goes on."""
    monkeypatch.setattr(inquiries, "PROBE_TIMEOUT_S", 0.5)
    rotation, environment = Rotation(tmp_path, kind), Ticking()
    async with EmbeddedNats(config=rotation.before) as nats:
        server_options, options = rotation.options(nats.url, "srv"), rotation.options(nats.url, "alice")
        async with (
            serving(server_options, environment) as server,
            calling(options) as client,
            calling(options, timeout_s=0.5) as hasty,
        ):
            running = asyncio.create_task(call(client, ticks(MANY)))
            await environment.started.wait()
            await hasty.connect()
            await reload(nats, rotation.after)
            await becomes(lambda: not client.is_connected and not server._bus.connection.is_up)
            with pytest.raises(BusAuthError, match="refused the credentials"):
                await client.info()
            with pytest.raises(CallTimeoutError, match="refused the credentials"):
                await call(hasty, ticks(0))
            rotation.renew(nats.url)
            await client.wait_for_server(timeout_s=60)
            environment.enough = True
            await asyncio.wait_for(running, 60)
            await call(client, ticks(0))
            assert client.stats()["resent"] == 0
    refusals = [record for record in caplog.records if "refused the credentials" in record.message]
    assert 2 <= len(refusals) <= 6


async def test_a_result_is_collected_after_credentials_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10, P53: they are refused for longer than all tries of a part take: that is an outage, and ends no job."""
    monkeypatch.setattr(transfers, "PROBE_TIMEOUT_S", 0.1)
    rotation = Rotation(tmp_path, "password")
    async with EmbeddedNats(config=rotation.before) as nats:
        server_options, options = rotation.options(nats.url, "srv"), rotation.options(nats.url, "alice")
        async with serving(server_options) as server, calling(options, pull_window=1, part_retries=2) as client:
            await client.wait_for_server(timeout_s=LONG_S)
            assert client._session is not None
            assert client._bus is not None
            window, jobs = client._session._large._transfers._window, server._desks.reception.jobs
            await client._bus.thread.run(window.acquire())  # nothing is collected before they change
            running = asyncio.create_task(call(client, ticks(0, size=2_000_000)))
            await becomes(lambda: jobs.held_bytes > 2_000_000, what="the result")
            await reload(nats, rotation.after)
            await becomes(lambda: client._bus.connection.trouble is not None, what="a refusal")
            client._bus.thread.crossing.post(window.release)
            await asyncio.wait({running}, timeout=0.5)
            assert not running.done()
            rotation.renew(nats.url)
            assert len((await asyncio.wait_for(running, 60))["blob"]) == 2_000_000
            assert client.stats()["resent"] == 0


async def test_nats_py_does_not_reconnect_for_ever_with_old_credentials(tmp_path: Path) -> None:
    """P10: NATS is away when they change: its own reconnecting goes on with what it read at first."""
    async with EmbeddedNats(config=one_account()) as nats:
        options = resolve_bus_options(context=str(write_context(tmp_path, nats.url, "alice")))
        async with connected(options) as connection:
            await nats.kill()
            nats._config = one_account().replace("user: alice, password: x", "user: alice, password: new")
            await nats.restart()
            await becomes(lambda: connection.trouble is not None)
            write_context(tmp_path, nats.url, "alice", credentials='"user": "alice", "password": "new"')
            await becomes(lambda: connection.is_up)
            assert connection.trouble is None


# ---- controllers


async def test_servers_connect_with_a_context_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P53: the fleet file's contexts count, not ENVBUS_URL; a server has nothing of the controller's credentials."""
    told = tmp_path / "environ"
    script = f"env > {told}.new && mv {told}.new {told} && exec sleep 60"
    async with EmbeddedNats(config=one_account()) as nats:
        for name in ("ENVBUS_URL", "NATS_URL"):
            monkeypatch.setenv(name, "nats://ctl:secret@127.0.0.1:1")
        spec = fleet_file(tmp_path, nats.url, env=f'command = ["/bin/sh", "-c", "{script}"]\n')
        one = Controller(spec, tell=lambda note: None)
        running = asyncio.create_task(one.run())
        await becomes(told.exists, what="a server")
        one.stop()
        await asyncio.wait_for(running, LONG_S)
        environ = dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)
        assert "secret" not in told.read_text()
        for name in ("ENVBUS_URL", "NATS_URL", "ENVBUS_CONTEXT"):
            monkeypatch.setenv(name, environ[name])
        assert resolve_bus_options() == resolve_bus_options(context=f"{tmp_path}/contexts/srv.json")
        assert resolve_bus_options().user == "srv"


async def test_a_controller_waits_for_nats(tmp_path: Path) -> None:
    """P24: as servers do; a stop while it waits ends it."""
    async with EmbeddedNats(config=one_account()) as nats:
        spec = fleet_file(tmp_path, nats.url, env="replicas = 0\n")
        await nats.kill()
        notes: list[Note] = []
        early, late = Controller(spec), Controller(spec, tell=notes.append)
        running = [asyncio.create_task(one.run()) for one in (early, late)]
        await asyncio.sleep(0)
        early.stop()
        await asyncio.wait_for(running[0], LONG_S)
        assert not running[1].done()
        await nats.restart()
        await becomes(lambda: any("controller one runs" in note.text for note in notes))
        late.stop()
        await asyncio.wait_for(running[1], LONG_S)


async def test_a_signal_ends_envbus_up_while_it_waits(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    """P24: with exit code 0, one line of what it waits for, and one that it has ended."""
    up = asyncio.create_task(up_command._run(fleet_file(tmp_path, "nats://127.0.0.1:1"), as_json=False))
    await becomes(lambda: "127.0.0.1:1" in caplog.text, what="that it waits")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(up, LONG_S) == 0
    assert "stopped before NATS was there" in capsys.readouterr().out
    assert caplog.text.count("127.0.0.1:1") == 1 + caplog.text.count("such in")


async def test_a_beat_alone_ends_no_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """P53: who may send a controller's heartbeat, and nothing else, is no rival; one that answers to its name is."""
    monkeypatch.setattr(control_api, "CLAIM_TIMEOUT_S", 0.3)
    async with EmbeddedNats() as nats:
        (tmp_path / "fleet.toml").write_text(
            f'[bus]\naddress = "{nats.url}"\n[controller]\nid = "one"\n[[env]]\nid = "reverse-text"\nreplicas = 0\n'
        )
        notes: list[Note] = []
        one = Controller(read_fleet_file(tmp_path / "fleet.toml"), tell=notes.append)
        running = asyncio.create_task(one.run())
        await becomes(lambda: any("controller one runs" in note.text for note in notes))
        beat = pack(ControllerBeat(controller="one", host="elsewhere", pid=1, version="0", started_at=1.0))
        async with connected(resolve_bus_options(nats.url)) as connection:
            await connection.publish(controller_beat("one"), beat)
            await becomes(lambda: any("elsewhere" in record.message for record in caplog.records))
            assert not running.done()
            assert not any("stopping" in note.text for note in notes)
            await connection.subscribe(controller("one"), lambda message: connection.send(message.reply, beat))
            await connection.round_trip(timeout_s=5)
            await connection.publish(controller_beat("one"), beat)
            with pytest.raises(UsageError, match="already runs on host elsewhere"):
                await asyncio.wait_for(running, LONG_S)
