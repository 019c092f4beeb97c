"""Least privilege is enough, for every role and in both ways to set NATS up; what is denied is named, and soon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

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
    server_of,
    serving,
    ticks,
)
from stage import becomes

from envbus.adapters.gateway.gateway import Gateway
from envbus.bus import denials
from envbus.bus.embedded import EmbeddedNats
from envbus.client import inquiries
from envbus.controller.controller import Controller
from envbus.controller.fleet_views import ServerView
from envbus.controller.operator import Operator
from envbus.controller.permission_probes import ROLES, is_allowed, needs
from envbus.dashboard.dashboard import Dashboard
from envbus.errors import BusPermissionError

LONG_S = 20.0
"""A loaded machine's second; every timeout that could end a call instead is longer."""
OF_ROLE = {"trainer": "alice", "server": "srv", "operator": "ops", "controller": "ctl", "dashboard": "dash"}


def denied(action: str, subject: str) -> Any:
    return pytest.raises(BusPermissionError, match=rf"denied this user to {action} to '{subject}.*give it th")


@pytest.mark.parametrize("mode", MODES)
async def test_least_privilege_is_enough(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """P53: rollouts with progress and a result in parts, the eval set, servers(), an operator's order; nothing is
    denied on the way."""
    async with (
        EmbeddedNats(config=MODES[mode]()) as nats,
        serving(as_user(nats, "srv")) as server,
        calling(as_user(nats, "alice")) as client,
        Operator(as_user(nats, "ops")) as operator,
    ):
        await client.wait_for_server(timeout_s=LONG_S)
        reports: list[int] = []
        output = await call(client, ticks(3, size=2_000_000), reports)
        assert (len(output["blob"]), reports) == (2_000_000, [0, 1, 2])
        assert len(await client.examples()) == 3
        assert [beat.server for beat in await client.servers()] == [server.server_id]
        assert await operator.check_allowed() == []
        await operator.ping(ServerView(server=server.server_id, env="stage", state="ready"))
    assert [record.message for record in caplog.records if "denied" in record.message] == []


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_has_what_it_needs(role: str) -> None:
    """P53: the probes of ``envbus doctor`` find nothing to grant to the users of the documented roles, and find what
    is missing for the others."""
    able: dict[str, list[bool]] = {}
    async with EmbeddedNats(config=one_account()) as nats, connected(as_user(nats, OF_ROLE[role])) as connection:
        for need in needs("stage", "env", controller_id="one"):
            able.setdefault(need.role, []).append(await is_allowed(connection, need))
    assert all(able.pop(role))
    assert {other for other, rights in able.items() if all(rights)} <= {"dashboard"}


CALLS: dict[str, Callable[[Any], Any]] = {
    "env.stage.rollout": lambda client: call(client, ticks(0)),
    "env.stage.server": lambda client: call(client, ticks(300)),
    "env.stage.info": lambda client: client.info(),
    "env.stage.examples": lambda client: client.examples(),
}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call ends by its own timeout."""
    for name in ("PROBE_TIMEOUT_S", "PAGE_TIMEOUT_S"):
        monkeypatch.setattr(inquiries, name, 60.0)


@pytest.mark.parametrize("mode", MODES)
async def test_a_trainer_is_told_what_it_may_not(mode: str, patient: None) -> None:
    """P53, P59: each call ends with the denied subject, not by a timeout."""
    for subject, ask in CALLS.items():
        without = f"publish {subject}{'.*' if subject.endswith('server') else ''}"
        async with (
            EmbeddedNats(config=MODES[mode](alice=[without])) as nats,
            serving(as_user(nats, "srv")),
            calling(as_user(nats, "alice"), accept_timeout_s=60) as client,
        ):
            if subject != "env.stage.info":
                await client.wait_for_server(timeout_s=LONG_S)
            async with asyncio.timeout(LONG_S):
                with denied("publish", subject):
                    await ask(client)


@pytest.mark.parametrize("mode", MODES)
async def test_a_trainer_that_may_not_wait_is_told(mode: str) -> None:
    """P53: as soon as it has to."""
    async with (
        EmbeddedNats(config=MODES[mode](alice=["publish env.*.wait"])) as nats,
        calling(as_user(nats, "alice"), no_server_timeout_s=600) as client,
        asyncio.timeout(LONG_S),
    ):
        with denied("publish", "env.stage.wait"):
            await call(client, ticks(0))


async def test_what_is_granted_later_needs_no_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    """P53: by a reload, which ends no connection: a job that waits for a server is not ended by the old denial."""
    async with (
        EmbeddedNats(config=one_account(alice=["publish env.*.rollout"])) as nats,
        calling(as_user(nats, "alice"), no_server_timeout_s=600) as client,
    ):
        with denied("publish", "env.stage.rollout"):
            await asyncio.wait_for(call(client, ticks(0)), LONG_S)
        await reload(nats, one_account())
        monkeypatch.setattr(denials, "PUBLISH_COUNTS_S", 0.0)  # as if that was a while ago
        running = asyncio.create_task(call(client, ticks(0)))
        await asyncio.wait({running}, timeout=0.5)
        async with serving(as_user(nats, "srv")):
            await asyncio.wait_for(running, LONG_S)
        assert client._bus is not None
        assert client._bus.connection.stats.reconnects == 0


@pytest.mark.parametrize(
    "without",
    [
        *(
            f"subscribe env.*.{what}"
            for what in ("rollout", "info", "examples", "wait", "server.*", "ctl.*", "ctl.all")
        ),
        "publish env.*.beat.*",
    ],
)
async def test_a_server_is_not_ready_without_what_it_needs(without: str) -> None:
    """P53: it ends before it has loaded its environment, with the denied subject in its error."""
    action, _, subject = without.partition(" ")
    environment = Ticking()
    environment.eval_examples = None  # type: ignore[assignment,method-assign] # it would fail if it were loaded
    async with EmbeddedNats(config=one_account(srv=[without])) as nats:
        async with asyncio.timeout(LONG_S):
            with denied(action, subject.replace("*", "stage", 1).replace(".*", ".")):
                await server_of(as_user(nats, "srv"), environment).run()


async def test_all_that_a_server_may_not_is_one_error() -> None:
    """As with a trainer's context by mistake: one sentence that names it all."""
    async with EmbeddedNats(config=one_account(srv=["subscribe env.*.wait", "publish env.*.beat.*"])) as nats:
        told = (
            r"denied this user to subscribe to 'env\.stage\.wait' and publish to 'env\.stage\.beat\..*'; give it these"
        )
        async with asyncio.timeout(LONG_S):
            with pytest.raises(BusPermissionError, match=told):
                await server_of(as_user(nats, "srv"), Ticking()).run()


async def test_what_works_without_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """P53: news of ended servers, heartbeats and discovery: said once each, also after a reconnect, and never as an
    error; only who asks for heartbeats is told that it may not."""
    optional = ["subscribe env.*.gone", "subscribe env.*.beat.*", "subscribe envctl.beat.*"]
    async with (
        EmbeddedNats(config=one_account(alice=optional, srv=["subscribe $SRV.>"])) as nats,
        serving(as_user(nats, "srv")) as server,
        calling(as_user(nats, "alice")) as client,
    ):
        await client.wait_for_server(timeout_s=LONG_S)
        await call(client, ticks(0))
        await reconnect(client)
        await reconnect(server)
        await client.wait_for_server(timeout_s=LONG_S)
        with denied("subscribe", r"env\.\*\.beat\.\*"):
            await client.servers()
    told = [record for record in caplog.records if "denied this user" in record.message]
    assert {record.levelno for record in told} == {logging.WARNING}
    reasons = [record.message.partition("without it ")[2] for record in told]
    assert sorted(reasons) == [
        "'nats micro' does not see this server",
        "it is not known which servers there are",
        "it is not told why an env has no servers",
        "the end of a server is noticed a little later",
    ]


@pytest.fixture
async def bus_without() -> AsyncIterator[Callable[..., Any]]:
    """Starts a NATS server on which some users may not do something."""
    running: list[EmbeddedNats] = []

    async def start(**without: list[str]) -> EmbeddedNats:
        running.append(await EmbeddedNats.start(config=one_account(**without)))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for nats in running:
        await nats.stop()


@pytest.mark.parametrize(
    ("without", "subject"),
    [
        ("subscribe env.*.beat.*", r"env\.stage\.beat\.\*"),
        ("subscribe envctl.one", "envctl.one"),
        ("subscribe envctl.beat.*", "envctl.beat.one"),
        ("publish envctl.beat.one", "envctl.beat.one"),
        ("publish env.*.gone", "env.stage.gone"),
        ("publish env.*.ctl.*", "env.stage.ctl."),
    ],
)
async def test_a_controller_starts_nothing_without_what_it_needs(
    without: str, subject: str, tmp_path: Path, bus_without: Callable[..., Any]
) -> None:
    """P53."""
    spec = fleet_file(tmp_path, (await bus_without(ctl=[without])).url)
    async with asyncio.timeout(LONG_S):
        with denied(without.partition(" ")[0], subject):
            await Controller(spec).run()
    assert not (tmp_path / "envbus-logs").exists(), "no server was launched"


async def test_operators_and_dashboards_are_told(bus_without: Callable[..., Any], caplog: Any) -> None:
    """P53: one that may not hear servers, or not give the order, is told at once; one that may not hear controllers
    is told what is missing; a dashboard that may not ask servers shows them all the same, and asks once."""
    beats = "subscribe env.*.beat.*"
    nats = await bus_without(ops=["subscribe envctl.beat.*", "publish env.*.ctl.*"], dash=[beats], alice=[beats])
    async with serving(as_user(nats, "srv")) as server, asyncio.timeout(LONG_S):
        async with Operator(as_user(nats, "ops")) as operator:
            [missing] = await operator.check_allowed()
            assert "subscribe to 'envctl.beat.*'" in missing
            assert "no controllers are seen" in missing
            with denied("publish", f"env.stage.ctl.{server.server_id}"):
                await operator.ping(ServerView(server=server.server_id, env="stage", state="ready"), timeout_s=60)
            dashboard = Dashboard(operator, port=0, host="127.0.0.1")
            async with dashboard:
                await dashboard._ask(ServerView(server=server.server_id, env="stage", state="ready"))
                assert not dashboard._may_ask
        async with Operator(as_user(nats, "dash")) as operator:
            with denied("subscribe", r"env\.\*\.beat\.\*"):
                async with Dashboard(operator, port=0, host="127.0.0.1"):
                    pass


async def test_a_gateway_says_what_it_may_not(bus_without: Callable[..., Any]) -> None:
    """P53: on its health page, and to those who ask for rollouts."""
    nats = await bus_without(alice=["publish env.*.info"])
    async with Gateway([("tcp://127.0.0.1:*", "stage")], as_user(nats, "alice")) as gateway:
        await becomes(lambda: "denied this user to publish to 'env.stage.info'" in gateway.troubles().get("stage", ""))
