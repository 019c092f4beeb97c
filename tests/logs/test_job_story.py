"""The life of a job, followed by its id over the logs of its client and of the servers that had it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import nats
from log_story import LogFile, happened, story
from stage import ServerProcess, Stage, becomes, do, run, settled

from envbus.bus.messages import Control, Ok, pack, parse_as
from envbus.bus.subjects import Subjects
from envbus.client import NATSEnvClient


async def say_everything(stage: Stage) -> None:
    """An operator's order to all servers: log at DEBUG from now on."""
    connection = await nats.connect(stage.url)
    try:
        subject = Subjects(str(stage.name), stage.prefix).ctl_all
        answer = await connection.request(subject, pack(Control(action="log_level", level="debug")), timeout=20)
        assert parse_as(answer.data, Ok).state == "ready"
    finally:
        await connection.close()


async def logs_of(*servers: ServerProcess) -> dict[int, LogFile]:
    files = {server.pid: LogFile(server.log_file) for server in servers}
    for file in files.values():
        await becomes(lambda file=file: bool(file.lines("operator: log_level")), what="the level is set")
    return files


async def test_a_job_that_lost_its_server_is_followed_by_its_id(stage: Stage, own_log: LogFile) -> None:
    """P64. Servers log at INFO until an operator orders more; no password is in any log."""
    servers = [stage.launch(log_level="INFO", json_logs=True) for _ in range(2)]
    await stage.ready()
    await say_everything(stage)
    files = await logs_of(*servers)
    logging.getLogger("envbus").setLevel(logging.DEBUG)
    item = do("slow_then", t=60, t_again=0.1)
    async with stage.client() as client:
        call = asyncio.create_task(run(client, item))
        first = await stage.event("start", item["example_id"])
        job = first["job"].removeprefix("job ")
        session = client._session
        assert session is not None
        await becomes(lambda: bool(session._attempts.holders()), what="the client knows that it was accepted")
        stage.server_of(first).kill()
        output = await call
        assert output["pid"] != first["pid"]
        await settled(client)
        await becomes(lambda: bool(files[output["pid"]].lines("confirmed")), what="the confirmation is logged")
        assert client.stats()["resent"] == 1
    told = story([own_log, *files.values()], job)
    a, b = (files[pid].lines()[-1]["server"] for pid in (first["pid"], output["pid"]))
    assert_in_order(
        told,
        ("envbus.client", "submitted", {"rollouts": 1}),
        ("envbus.client", "sent", {"attempt": 1}),
        ("envbus.server", "accepted", {"attempt": 1, "server": a, "env": "stage"}),
        ("envbus.server", "started", {"server": a}),
        ("envbus.client", f"sent again: server {a[:8]}", {"attempt": 2, "level": "WARNING"}),
        ("envbus.client", "sent", {"attempt": 2}),
        ("envbus.server", "accepted", {"attempt": 2, "server": b}),
        ("envbus.server", "ended", {"attempt": 2, "server": b, "state": "result"}),
        ("envbus.client", "delivered", {"attempt": 2, "server": b, "state": "result"}),
        ("envbus.server", "confirmed by its client", {"attempt": 2, "server": b}),
    )
    assert {line["client"] for line in told if "client" in line} == {client._client_id}
    (ended,) = [line for line in told if line["message"] == "ended"]
    assert ended["seconds"] >= 0.1
    assert ended["bytes"] > 0
    (summary,) = own_log.lines(f"client {client._client_id[:8]}: ")
    assert "1 job, 1 sent again" in summary["message"]
    assert not any("pa55word" in file.text for file in [own_log, *files.values()])


def assert_in_order(told: list[dict[str, Any]], *expected: tuple[str, str, dict[str, Any]]) -> None:
    """These lines are there, one after the other, whatever is between."""
    left = iter(told)
    for logger, message, fields in expected:
        found = any(
            line["logger"] == logger and line["message"].startswith(message) and line.items() >= fields.items()
            for line in left
        )
        assert found, f"no {logger} {message!r} with {fields} in its place in:\n" + "\n".join(map(str, told))


async def test_late_answers_of_a_frozen_server_are_counted_and_logged_once(stage: Stage, own_log: LogFile) -> None:
    """P08, P12: it had been sent jobs that another server then took, and takes them up when it goes on."""
    frozen, other = stage.launch(max_concurrent=8), stage.launch(max_concurrent=8)
    await stage.ready()
    async with stage.client() as client:
        with frozen.frozen():
            outputs = await asyncio.gather(*(run(client, do()) for _ in range(24)))
            assert {output["pid"] for output in outputs} == {other.pid}
            unheard = len(client_session(client)._late)
            assert unheard > 0, "nats-server gave some of the first 8 to the frozen one"
        await becomes(lambda: client.stats()["late_accepts"] == unheard, what="late acceptances")
        await settled(client)
        await stage.idle()
        stats = client.stats()
        assert stats["unaccepted"] >= unheard
        assert all(len(own_log.lines(text)) <= 2 for text in ("a late acceptance", "a send got no answer"))
    assert happened(own_log.lines("a late acceptance")) == unheard
    assert happened(own_log.lines("a send got no answer")) == stats["unaccepted"]
    results = own_log.lines("a late result")
    assert happened(results) == stats["late_results"]
    assert len(results) <= 2
    (summary,) = own_log.lines("client ")
    assert f"{unheard:,} late acceptance" in summary["message"]


def client_session(client: NATSEnvClient) -> Any:
    assert client._session is not None
    return client._session
