"""docs/protocol.md against the code: its bytes over a real bus, and its tables of subjects, messages and codes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from doc_pages import blocks, marked, read, rows, table

from envbus import NATSEnvServer, ServerSettings
from envbus.bus import control_messages, messages
from envbus.bus.control_messages import EnvReport, ProcessReport
from envbus.bus.messages import Beat, Parts, WireMessage, parse
from envbus.bus.subjects import Subjects, controller, controller_beat, encode_token, env_name
from envbus.errors import EnvbusError
from envbus.types import ClientConfig

PAGE = "docs/protocol.md"
DOC_SERVER = b"0a1b2c3d4e5f60718293a4b5c6d7e8f9"
DOC_NODE = b"NABCDEFGHIJKLMNOPQRSTUVWXYZ234567ABCDEFGHIJKLMNOPQRSTUV2"
MODULES = (messages.__name__, control_messages.__name__)
KINDS = {cls.kind: cls for cls in WireMessage.__subclasses__() if cls.__module__ in MODULES}


def doc_bytes(mark: str) -> bytes:
    """Return the bytes of a hex block: in each line what stands before the ``#``."""
    codes = [line.partition("#")[0] for line in marked(PAGE, mark).text.splitlines()]
    return bytes.fromhex("".join(codes))


class FixedEnv:
    """What the page's example is served by: it calls no model."""

    requires_group_rollouts = False

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def run_rollout(self, input: Any, client: Any, model: str, *args: Any, **options: Any) -> Any:
        await asyncio.sleep(self.delay_s)
        return {"example_id": input["example_id"], "reward": 1.0}

    async def run_group(self, group_inputs: Any, client: Any, model: str, *args: Any, **options: Any) -> Any:
        return [await self.run_rollout(item, client, model) for item in group_inputs]

    def eval_examples(self) -> list[Any]:
        return []

    async def close(self) -> None: ...


@asynccontextmanager
async def fixed_server(
    url: str, prefix: str, *, environment: FixedEnv | None = None, **settings: Any
) -> AsyncIterator[tuple[NATSEnvServer, Any, Subjects]]:
    """Serve FixedEnv, with a plain NATS connection beside it."""
    server = NATSEnvServer(
        "fixed",
        address=url,
        prefix=prefix,
        environment=environment or FixedEnv(),
        settings=ServerSettings(**settings),
        handle_signals=False,
    )
    running = asyncio.create_task(server.run())
    connection = await nats.connect(url)
    try:
        subjects = Subjects("fixed", prefix)
        await ready(connection, subjects)
        yield server, connection, subjects
    finally:
        await connection.close()
        await server.close()
        await running


async def ready(connection: Any, subjects: Subjects) -> None:
    beats = await connection.subscribe(subjects.beats)
    async with asyncio.timeout(40):
        while getattr(parse((await beats.next_msg(timeout=40)).data), "state", "") != "ready":
            pass


async def test_the_bytes_of_the_plain_request_get_the_bytes_of_the_reply(nats_url: str, prefix: str) -> None:
    async with fixed_server(nats_url, prefix) as (_, connection, subjects):
        reply = await connection.request(subjects.rollout, doc_bytes("plain-request"), timeout=20)
    assert reply.data == doc_bytes("plain-reply")


async def test_a_plain_request_that_outlasts_a_probe_gets_its_result(nats_url: str, prefix: str) -> None:
    slow = FixedEnv(delay_s=1.0)
    async with fixed_server(nats_url, prefix, environment=slow, probe_after_s=0.1) as (_, connection, subjects):
        reply = await connection.request(subjects.rollout, doc_bytes("plain-request"), timeout=20)
    assert reply.data == doc_bytes("plain-reply")


async def test_the_bytes_of_the_run_get_the_bytes_of_accepted_and_result(nats_url: str, prefix: str) -> None:
    async with fixed_server(nats_url, prefix) as (server, connection, subjects):
        inbox, node = connection.new_inbox(), connection._server_info["server_id"].encode()
        answers = await connection.subscribe(inbox)
        await connection.publish(subjects.rollout, doc_bytes("run"), reply=inbox)
        accepted = await answers.next_msg(timeout=20)
        result = await answers.next_msg(timeout=20)
        assert as_documented(accepted.data, server).replace(node, DOC_NODE) == doc_bytes("accepted")
        assert as_documented(result.data, server) == doc_bytes("result")
        confirmed = await connection.request(subjects.server(server.server_id), doc_bytes("done"), timeout=20)
        assert parse(confirmed.data).kind == "ok"


def as_documented(data: bytes, server: NATSEnvServer) -> bytes:
    return data.replace(server.server_id.encode(), DOC_SERVER)


def test_every_hex_block_states_its_length_and_is_used() -> None:
    marks = [block.mark for block in blocks(PAGE, "hex")]
    assert marks == ["plain-request", "plain-reply", "run", "accepted", "result", "done"]
    stated = [int(size) for size in re.findall(r"\((\d+) bytes\)", read(PAGE))]
    assert stated == [len(doc_bytes(mark)) for mark in marks]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {Beat.kind}))
def test_the_row_of_a_message_names_exactly_its_fields(kind: str) -> None:
    (row,) = [cells for cells in rows(PAGE) if cells[0] == f"`{kind}`" and len(cells) == 3]
    assert named_fields(row[2]) == fields_of(KINDS[kind])


def test_the_table_of_the_heartbeat_names_exactly_its_fields() -> None:
    assert named_fields(" ".join(cells[0] for cells in table(PAGE, "beat"))) == fields_of(Beat)
    bounds = ", ".join(f"{bound:g}" for bound in messages.DURATION_BOUNDS_S)
    assert f"bounds {bounds} s" in read(PAGE)


def named_fields(text: str) -> dict[str, bool]:
    """Return the names in backticks, with whether a question mark follows."""
    return {name: bool(optional) for name, optional in re.findall(r"`(\w+)`(\?)?", text)}


def fields_of(message: type[WireMessage]) -> dict[str, bool]:
    return {name: not field.is_required() for name, field in message.model_fields.items()}


def test_the_fields_of_maps_within_messages_are_named() -> None:
    text = " ".join(read(PAGE).split())
    reports = (*EnvReport.model_fields, *ProcessReport.model_fields)
    for name in (*Parts.model_fields, *reports, *set(ClientConfig.model_fields) - {"client_type"}):
        assert f"`{name}`" in text


def test_the_version_is_that_of_the_code() -> None:
    assert f"Protocol version: **{messages.PROTOCOL_VERSION}**" in read(PAGE)


def test_names_become_the_tokens_of_the_table() -> None:
    """P56."""
    listed = [[cell.strip("`") for cell in cells] for cells in table(PAGE, "name")]
    assert len(listed) == 5
    assert listed == [[name, encode_token(name)] for name, _ in listed]
    assert env_name("math", {"level": 5}) in read(PAGE)


def test_the_table_of_subjects_is_complete() -> None:
    subjects = Subjects("<env>")
    spelled = {subjects.rollout, subjects.info, subjects.examples, subjects.wait, subjects.ctl_all, subjects.gone}
    text = read(PAGE)
    for subject in spelled:
        assert subject.replace("%3Cenv%3E", "<env>") in text
    for subject in (controller("<controller>"), controller_beat("<controller>")):
        assert f"`{subject}`" in text
    for kind in ("server", "ctl", "beat"):
        assert getattr(subjects, kind)("<server>").replace("%3Cenv%3E", "<env>") in text


def test_the_codes_of_failures_are_codes_of_errors() -> None:
    paragraph = read(PAGE).partition("Codes of failures:")[2].partition("\n\n")[0]
    codes = {cls.code for cls in all_errors(EnvbusError)}
    documented = set(re.findall(r"`(\w+)`", paragraph)) - {"causes"}
    assert documented <= codes


def all_errors(cls: type[EnvbusError]) -> set[type[EnvbusError]]:
    return {cls}.union(*(all_errors(sub) for sub in cls.__subclasses__()))
