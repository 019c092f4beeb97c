"""A bus with least-privilege users, in one account or with an account per trainer, and what the tests do on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stage import CLIENT_SETTINGS, SERVER_SETTINGS, becomes
from stage_env import StageEnv

from envbus import ClientSettings, NATSEnvClient, NATSEnvServer, ServerSettings
from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.connection import Connection
from envbus.bus.embedded import EmbeddedNats
from envbus.controller.spec import FleetSpec, read_fleet_file
from envbus.environments import progress

REQUESTS = ["env.*.rollout", "env.*.info", "env.*.examples", "env.*.wait", "env.*.server.*"]
PUBLISH = {
    "srv": ["env.*.beat.*"],
    "alice": REQUESTS,
    "ops": ["env.*.ctl.*", "envctl.*", "env.*.info"],
    "ctl": ["envctl.beat.one", "envctl.one", "env.*.gone", "env.*.ctl.*"],
    "dash": [],
}
SUBSCRIBE = {
    "srv": [
        *("env.*.rollout workers", "env.*.info workers", "env.*.examples workers"),
        *("env.*.wait", "env.*.server.*", "env.*.ctl.*", "$SRV.>"),
    ],
    "alice": ["env.*.gone", "env.*.beat.*", "envctl.beat.*"],
    "ops": ["env.*.beat.*", "envctl.beat.*", "env.*.gone"],
    "ctl": ["env.*.beat.*", "envctl.one", "envctl.beat.*"],
    "dash": ["env.*.beat.*", "envctl.beat.*", "env.*.gone"],
}
ANSWERING = ("srv", "ctl")


def user(name: str, *, without: Iterable[str] = (), expires: str = "5m", password: str = "x") -> str:
    """A user of the configuration, with a password and an inbox prefix of its own.

    Args:
        without: What it may not, as ``publish SUBJECT`` or ``subscribe SUBJECT``.
    """
    inbox, denied = f"_INBOX_{name}.>", list(without)
    rights = []
    for action, allowed in (("publish", PUBLISH[name]), ("subscribe", SUBSCRIBE[name])):
        refused = [what.split(" ", 1)[1] for what in denied if what.startswith(action)]
        rights.append(f"{action}: {{allow: {_list([*allowed, inbox])}, deny: {_list(refused)}}}")
    if name in ANSWERING:
        rights.append(f'allow_responses: {{max: 100000, expires: "{expires}"}}')
    return f"{{user: {name}, password: {password}, permissions: {{{', '.join(rights)}}}}}"


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def one_account(*, expires: str = "5m", **without: Iterable[str]) -> str:
    """Roles in one account; ``name=[...]`` takes rights from a user."""
    users = [user(name, expires=expires, without=without.get(name, ())) for name in PUBLISH]
    return f"authorization: {{users: [{', '.join(users)}]}}"


def accounts(*, expires: str = "5m", **without: Iterable[str]) -> str:
    """The fleet's account, and one of alice's own that imports its services."""
    fleet = [user(name, expires=expires, without=without.get(name, ())) for name in PUBLISH if name != "alice"]
    news = ["env.*.gone", "env.*.beat.*", "envctl.beat.*"]
    exports = [f'{{service: "{s}", response_type: stream, response_threshold: "{expires}"}}' for s in REQUESTS]
    exports += [f'{{stream: "{s}"}}' for s in news]
    imports = [f'{{service: {{account: FLEET, subject: "{s}"}}}}' for s in REQUESTS]
    imports += [f'{{stream: {{account: FLEET, subject: "{s}"}}}}' for s in news]
    return (
        f"accounts: {{FLEET: {{users: [{', '.join(fleet)}], exports: [{', '.join(exports)}]}}, "
        f"ALICE: {{users: [{user('alice', without=without.get('alice', ()))}], imports: [{', '.join(imports)}]}}}}"
    )


MODES = {"one account": one_account, "accounts": accounts}


def as_user(nats: EmbeddedNats, name: str) -> BusOptions:
    """How a user connects."""
    return resolve_bus_options(nats.url, user=name, password="x", inbox_prefix=f"_INBOX_{name}")


def write_context(
    folder: Path, url: str, name: str, *, credentials: str = '"user": "{name}", "password": "x"', more: str = ""
) -> Path:
    """What ``envbus nats conf`` gives to a user."""
    file = folder / "contexts" / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    known = credentials.replace("{name}", name)
    file.write_text(f'{{"url": "{url}", {known}, "inbox_prefix": "_INBOX_{name}"{more}}}')
    return file


def fleet_file(folder: Path, url: str, *, env: str = "") -> FleetSpec:
    """A fleet of one env: its controller and its servers each connect as a context of their own says."""
    for name in ("ctl", "srv"):
        write_context(folder, url, name)
    (folder / "fleet.toml").write_text(
        '[bus]\ncontext = "contexts/ctl.json"\nserver_context = "contexts/srv.json"\n'
        f'[controller]\nid = "one"\n[[env]]\nid = "reverse-text"\nname = "stage"\n{env}'
    )
    return read_fleet_file(folder / "fleet.toml")


class Ticking(StageEnv):
    """Reports while it runs: ``{"do": "tick", "ticks": n}``, n times at most, until there is enough."""

    def __init__(self) -> None:
        super().__init__("/dev/null", groups=False, teardown_s=0, tag="")
        self.started = asyncio.Event()
        self.enough = False

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": n} for n in range(3)]

    async def _act(self, item: Any) -> dict[str, Any]:
        self.started.set()
        for number in range(item.get("ticks", 0)):
            if self.enough:
                break
            await progress.report({"n": number})
            await asyncio.sleep(0.05)
        return {"prompt": [], "completion": [], "blob": os.urandom(item.get("size", 0))}


def ticks(count: int, *, size: int = 0, example_id: int = 0) -> Any:
    """An input of Ticking."""
    return {"prompt": [], "example_id": example_id, "do": "tick", "ticks": count, "size": size}


def server_of(
    options: BusOptions, environment: Any = None, *, max_concurrent: int = 4, **settings: Any
) -> NATSEnvServer:
    """A server of the test's environment."""
    return NATSEnvServer(
        "stage",
        address=options,
        environment=environment or Ticking(),
        max_concurrent=max_concurrent,
        settings=ServerSettings(**SERVER_SETTINGS | {"grace_s": 0.1, "collect_grace_s": 0.1} | settings),
        handle_signals=False,
    )


@asynccontextmanager
async def serving(
    options: BusOptions, environment: Any = None, *, max_concurrent: int = 4, **settings: Any
) -> AsyncIterator[NATSEnvServer]:
    """A server in this process, with a connection of its own."""
    server = server_of(options, environment, max_concurrent=max_concurrent, **settings)
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        await server.close()
        await running


def calling(options: BusOptions, *, timeout_s: float | None = None, **settings: Any) -> NATSEnvClient:
    """A client of that server."""
    limits = ClientSettings(**CLIENT_SETTINGS | {"close_timeout_s": 0.1} | settings)
    return NATSEnvClient(options, "stage", settings=limits, timeout_s=timeout_s)


async def call(client: NATSEnvClient, item: Any, reports: list[int] | None = None) -> Any:
    """Run one rollout; what it reports goes to a list."""
    on_progress = None if reports is None else lambda report: reports.append(report.data["n"])
    return await client.run_rollout(item, None, "m", on_progress=on_progress)


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[Connection]:
    """A bare connection."""
    connection = Connection(options, name="test")
    await connection.open(timeout_s=5)
    try:
        yield connection
    finally:
        await connection.close()


async def reconnect(party: NATSEnvServer | NATSEnvClient) -> None:
    """Have a party in this process lose its connection to NATS, and wait until it is back."""
    bus = party._bus
    assert bus is not None
    connection = bus.connection
    before = connection.stats.reconnects + connection.stats.rebuilds
    assert connection._client is not None
    await bus.thread.run(connection._client.force_reconnect())
    await becomes(
        lambda: connection.stats.reconnects + connection.stats.rebuilds > before and connection.is_up, what="back"
    )


async def reload(nats: EmbeddedNats, config: str) -> None:
    """Have a NATS server read another configuration."""
    assert nats._directory is not None
    (nats._directory / "nats.conf").write_text(config)
    assert nats.log_file is not None
    log, said = nats.log_file, "Reloaded server configuration"
    before = log.read_text().count(said)
    nats._signal("HUP")
    await becomes(lambda: log.read_text().count(said) > before, what=said)
