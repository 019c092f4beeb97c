"""The bus at its worst: a fleet whose NATS restarts, a user that may not hear, mixed versions, odd ids."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from cli_process import Cli, wait_for_line
from stage import CLIENT_SETTINGS, READY_S, SERVER_SETTINGS, Stage, becomes, do, run
from stage_env import StageEnv

from envbus import ClientSettings, NATSEnvClient, NATSEnvServer, ServerSettings
from envbus.bus.address import BusOptions
from envbus.bus.dialer import RECONNECT_MAX_S, backoff_s
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import Failure, Run, pack, parse_as
from envbus.bus.subjects import Subjects
from envbus.errors import BusPermissionError, FingerprintError


@asynccontextmanager
async def served(address: Any, *, prefix: str, environment: Any, name: str = "stage") -> Any:
    """A server in this process. Servers with equal options share a connection; others have one of their own."""
    server = NATSEnvServer(
        name,
        address=address,
        prefix=prefix,
        environment=environment,
        settings=ServerSettings(**SERVER_SETTINGS | {"orphan_grace_s": 20.0}),
        handle_signals=False,
    )
    serving = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        await server.close()
        await serving


async def test_a_fleet_outlives_a_restart_of_nats(own_nats: EmbeddedNats, tmp_path: Path) -> None:
    """P24: 10 servers and 2 clients, each with a connection of its own; rollouts that end before and after NATS is
    back; none runs twice, all servers say again that they are there, and take jobs."""
    stage = Stage(own_nats.url, tmp_path)

    def connection(number: int) -> BusOptions:
        return BusOptions(servers=(own_nats.url,), inbox_prefix=f"_INBOX_{number}")

    items = [do("slow", t=0.5 if number % 2 else 2) for number in range(20)]
    async with AsyncExitStack() as stack:
        for number in range(10):
            environment = StageEnv(str(stage.ledger_file), groups=False, teardown_s=0, tag=f"server {number}")
            await stack.enter_async_context(served(connection(number), prefix=stage.prefix, environment=environment))
        settings = ClientSettings(**CLIENT_SETTINGS | {"stall_timeout_s": 60.0, "accept_timeout_s": 10.0})
        clients = [
            await stack.enter_async_context(
                NATSEnvClient(connection(10 + n), "stage", prefix=stage.prefix, settings=settings)
            )
            for n in range(2)
        ]
        before = await until_ready(stage, 10)
        calls = [asyncio.create_task(run(clients[n % 2], item)) for n, item in enumerate(items)]
        await stage.event("start", count=20)
        await becomes(lambda: not any(map(has_unaccepted, clients)))  # an acceptance may be under way
        await own_nats.kill()
        await stage.event("end", count=10)
        await own_nats.restart()
        outputs = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
        assert await until_ready(stage, 10) == before, "the same servers, all of them"
        outputs = await asyncio.gather(*(run(clients[n % 2], do("slow", t=0.2)) for n in range(60)))
        assert len({output["tag"] for output in outputs}) > 5
        assert [client._session.counts["resent"] for client in clients if client._session] == [0, 0]
    starts = Counter(entry["example_id"] for entry in stage.events("start"))
    assert [starts[item["example_id"]] for item in items] == [1] * 20


def has_unaccepted(client: NATSEnvClient) -> bool:
    """Whether a client has jobs that no server has accepted yet, as far as it knows."""
    return client._session is not None and bool(client._session._dispatch.pending())


async def until_ready(stage: Stage, count: int) -> set[str]:
    """Wait until so many servers say that they take jobs; their ids."""
    async with stage.beats() as beats:
        now = await beats.until(lambda now: sum(beat.state == "ready" for beat in now) == count, timeout_s=30)
    return {beat.server for beat in now}


def test_reconnects_are_spread() -> None:
    """P24: no two of a fleet come back in step, and none waits for longer than the bound."""
    pauses = [[backoff_s(tries) for _ in range(200)] for tries in range(1, 12)]
    assert all(len(set(each)) > 190 for each in pauses)
    assert all(max(each) > 1.5 * min(each) for each in pauses)
    assert max(max(each) for each in pauses) <= RECONNECT_MAX_S


@pytest.mark.parametrize("subject", ["env.*.server.>", "env.*.rollout", "env.*.wait"])
async def test_a_server_that_may_not_hear_its_clients_does_not_get_ready(subject: str) -> None:
    """P53: it ends with the denied subject in its error."""
    user = f'{{user: a, password: b, permissions: {{subscribe: {{deny: ["{subject}"]}}}}}}'
    async with EmbeddedNats(config=f"authorization: {{users: [{user}]}}") as restricted:
        server = NATSEnvServer(
            "stage",
            address=restricted.url.replace("://", "://a:b@"),
            environment=StageEnv("/dev/null", groups=False, teardown_s=0, tag=""),
            handle_signals=False,
        )
        word = subject.split(".")[2]
        with pytest.raises(BusPermissionError, match=rf"to subscribe to 'env\.stage\.{word}.*give it that permission"):
            await asyncio.wait_for(server.run(), 20)


MODULE = """
from importlib.metadata import version

class Env:
    requires_group_rollouts = False

    async def run_rollout(self, input, client, model, *args, **kwargs):
        return {"example_id": 0, "reward": 1.0, "version": version("versioned-env")}

    run_group = run_rollout

    def eval_examples(self):
        return []

    async def close(self):
        pass

def load_environment():
    return Env()
"""


async def test_two_versions_of_a_package_are_told_apart(cli: Cli, nats_url: str, prefix: str) -> None:
    """P35: under one name; a client that pins a fingerprint reaches that version only, or hears what is there."""
    servers = []
    for number in ("1.0.0", "2.0.0"):
        info = cli.folder / number / f"versioned_env-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: versioned-env\nVersion: {number}\n")
        (info.parent / "versioned_env.py").write_text(MODULE)
        options = ("--address", nats_url, "--prefix", prefix, "--env-dir-path", str(info.parent))
        servers.append(cli.start("serve", "versioned-env", *options))
    for server in servers:
        wait_for_line(server, "is ready", stream="stderr")
    async with NATSEnvClient(nats_url, "versioned-env", prefix=prefix) as client:
        there = {beat.versions["env"]: beat.fingerprint for beat in await client.servers()}
    assert there.keys() == {"1.0.0", "2.0.0"}
    options_: dict[str, Any] = {
        "prefix": prefix,
        "settings": ClientSettings(**CLIENT_SETTINGS | {"no_server_timeout_s": 0.5}),
    }
    for number, fingerprint in there.items():
        async with NATSEnvClient(nats_url, "versioned-env", fingerprint=fingerprint, **options_) as client:
            outputs: list[Any] = await asyncio.gather(*(run(client, do()) for _ in range(8)))
            assert {output["version"] for output in outputs} == {number}
    async with NATSEnvClient(nats_url, "versioned-env", fingerprint="0" * 16, **options_) as client:
        with pytest.raises(FingerprintError, match="|".join(there.values())):
            await asyncio.wait_for(run(client, do()), 20)
    for server in servers:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=20)


class OddIds(StageEnv):
    """Ids of several kinds; rollouts end in no order."""

    IDS = ("a-1", 7, "7", 0, "é/b c")

    def __init__(self) -> None:
        super().__init__("/dev/null", groups=False, teardown_s=0, tag="")

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": example_id, "mark": n} for n, example_id in enumerate(self.IDS)]

    async def _act(self, item: Any) -> dict[str, Any]:
        await asyncio.sleep(random.random() / 20)
        return {"mark": item["mark"], "prompt": [], "completion": []}


async def test_ids_keep_their_type_and_results_find_their_rows(nats_url: str, prefix: str) -> None:
    """P61: over the bus, three rollouts each, whatever ends first."""
    async with (
        served(nats_url, prefix=prefix, environment=OddIds()),
        NATSEnvClient(nats_url, "stage", prefix=prefix) as client,
    ):
        await client.wait_for_server(timeout_s=READY_S)
        result: Any = await client.evaluate(None, "m", rollouts_per_example=3)
    rows = [(output["example_id"], output["mark"]) for output in result["outputs"]]
    assert rows == [(example_id, n) for n, example_id in enumerate(OddIds.IDS) for _ in range(3)]
    assert [type(example_id) for example_id, _ in rows] == [type(i) for i in OddIds.IDS for _ in range(3)]


async def test_a_request_that_comes_too_late_is_not_started(nats_url: str, prefix: str) -> None:
    """P23: whatever held it up, also a clock that is wrong; the answer says by how much, and the server counts it."""
    environment = OddIds()
    async with served(nats_url, prefix=prefix, environment=environment) as server:
        async with NATSEnvClient(nats_url, "stage", prefix=prefix) as client:
            await client.wait_for_server(timeout_s=READY_S)
        connection = await nats.connect(nats_url)
        late = Run(
            job="a", attempt=1, client="c", call="rollout", size=1, start_by=time.time() - 7, encoding="", body=b"x"
        )
        reply = await connection.request(Subjects("stage", prefix).rollout, pack(late), timeout=20)
        await connection.close()
        failure = parse_as(reply.data, Failure)
        assert failure.code == "late_request"
        assert "7." in failure.message
        assert "clocks" in failure.message
        counts = server._desks.reception.counts
        assert (counts["expired"], counts["jobs"]) == (1, 0)


class Link:
    """A way to a NATS server that can be cut."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._writers: list[asyncio.StreamWriter] = []
        self.url = ""

    async def open(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", port)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await asyncio.sleep(0)

    async def mend(self) -> None:
        await self.open(int(self.url.rpartition(":")[2]))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        there, out = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(out)
        if not self._server.is_serving() or writer.is_closing():  # it was cut meanwhile
            out.transport.abort()
        await asyncio.gather(self._pipe(reader, out), self._pipe(there, writer))

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()


async def test_a_client_that_is_cut_off_for_longer_than_the_grace_starts_its_jobs_anew(stage: Stage) -> None:
    """P07, P24: to the server it looks like a death; the call ends all the same, with its second attempt."""
    stage.launch()
    item = do("slow_then", t=60, t_again=0)
    link = Link(stage.url)
    await link.open()
    settings = ClientSettings(**CLIENT_SETTINGS)
    async with NATSEnvClient(link.url, name="stage", prefix=stage.prefix, settings=settings) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(run(client, item))
        first = await stage.event("start", item["example_id"])
        await link.cut()
        await stage.event("cancelled", item["example_id"], timeout_s=60)
        assert not call.done()
        await link.mend()
        await asyncio.wait_for(call, 60)
        second = await stage.event("start", item["example_id"], count=2)
        assert first["job"] == second["job"]
    await link.cut()
    await stage.idle()


async def test_a_stop_while_nats_is_away_cuts_what_outlasts_the_grace(own_nats: EmbeddedNats, tmp_path: Path) -> None:
    """P19: the third run with the second's rollouts: exit in time, cleanup and teardown, no traceback."""
    stage = Stage(own_nats.url, tmp_path)
    try:
        server = stage.launch(settings={"grace_s": 0.3, "collect_grace_s": 0.3})
        item = do("slow", t=60)
        async with stage.client() as client:
            await client.wait_for_server(timeout_s=READY_S)
            call = asyncio.create_task(run(client, item))
            await stage.event("start", item["example_id"])
            await own_nats.kill()
            server.signal(signal.SIGTERM)
            assert await server.exit_code() == 0
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert [entry["event"] for entry in stage.events()][-3:] == ["cancelled", "teardown", "torn_down"]
        assert "Traceback" not in server.log
    finally:
        stage.close()
