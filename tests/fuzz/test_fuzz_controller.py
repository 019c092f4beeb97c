"""Wrong messages to a controller, and to those who listen to heartbeats: operators and metrics pages (P60)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from byte_fuzz import random_inputs
from fuzz_stage import BOUND_S, Stranger, a_stranger, assert_no_errors, becomes
from mutations import packed, wrong_messages

from envbus.bus.codec import decode_map
from envbus.bus.messages import Beat, parse_as
from envbus.bus.subjects import Subjects, controller, controller_beat
from envbus.controller.controller import Controller
from envbus.controller.instructions import Note
from envbus.controller.operator import Operator
from envbus.controller.spec import FleetSpec

BEAT: dict[str, Any] = {
    "v": 1,
    "t": "beat",
    "server": "s",
    "env": "e",
    "state": "ready",
    "error": None,
    "host": "h",
    "versions": {"env": "1"},
    "env_id": "e",
    "fingerprint": "f",
    "interval_s": 1.0,
    "controller": "c",
    "failed_by_type": {"E": 1},
    "waiting_by_client": {"c": 1},
    "recent": [{"example_id": "1", "reward": 1.0, "duration_s": 1.0, "client": "c"}],
    "duration_counts": [0] * 15,
    "sent_at": 1.0,
} | {
    name: 1
    for name, field in Beat.model_fields.items()
    if name in ("pid", "slots", "started_at") or (field.is_required() and field.annotation in (int, float))
}
CONTROLLER_BEAT: dict[str, Any] = {
    "v": 1,
    "t": "controller_beat",
    "controller": "other",
    "host": "h",
    "pid": 1,
    "version": "1",
    "started_at": 1.0,
    "envs": [{"env": "e", "env_id": "e", "replicas": 1}],
    "processes": [{"server": "s", "env": "e", "slot": 0, "generation": 0, "pid": 1, "state": "running"}],
    "interval_s": 1.0,
}
GONE = {"v": 1, "t": "gone", "server": "s", "reason": "why"}
ORDERS: list[dict[str, Any]] = [
    {"v": 1, "t": "scale", "env": "not there", "replicas": 1},
    {"v": 1, "t": "restart", "env": "not there"},
    {"v": 1, "t": "status_request"},
    {"v": 1, "t": "logs_request", "server": "s", "lines": 5, "after": 0},
    {"v": 1, "t": "control", "action": "drain"},
    {"v": 1, "t": "check", "client": "c", "jobs": []},
]


@pytest.fixture
async def stranger(nats_url: str) -> AsyncIterator[Stranger]:
    async with a_stranger(nats_url) as stranger:
        yield stranger


@pytest.fixture
async def fleet(nats_url: str, prefix: str, tmp_path: Path) -> AsyncIterator[Controller]:
    """A controller whose one env has no server."""
    spec = FleetSpec.model_validate(
        {
            "bus": {"address": nats_url, "prefix": prefix},
            "controller": {"id": "fuzzed", "log_dir": tmp_path, "metrics_port": 0, "metrics_host": "127.0.0.1"},
            "env": [{"id": "e", "replicas": 0}],
        }
    )
    notes: list[Note] = []
    one = Controller(spec, tell=notes.append)
    running = asyncio.create_task(one.run())
    await becomes(lambda: running.done() or any("runs; logs" in note.text for note in notes), what=lambda: str(notes))
    yield one
    assert not running.done(), "a stranger ended it"
    one.stop()
    await asyncio.wait_for(running, BOUND_S)


async def test_wrong_orders(
    fleet: Controller, stranger: Stranger, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = controller("fuzzed", prefix)
    wrong = [(f"{order['t']} {what}", data) for order in ORDERS for what, data in wrong_messages(order)]
    mutants = random_inputs(random.Random(5), [packed(order) for order in ORDERS])
    wrong += [(f"mutant {number}", next(mutants)) for number in range(500)]
    answers = await stranger.ask_all((f"{n} {what}", subject, data) for n, (what, data) in enumerate(wrong))
    assert not [what for what, answer in answers.items() if not answer]
    kinds = {decode_map(answer)["t"] for answer in answers.values() if answer}
    assert kinds == {"failure", "controller_beat"}
    assert_no_errors(caplog)


async def test_wrong_heartbeats(
    fleet: Controller, stranger: Stranger, prefix: str, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The controller, an operator's view of the fleet and the metrics page go on, and show numbers."""
    subjects = Subjects("e", prefix)
    told = [
        *((subjects.beat("s"), data) for _, data in wrong_messages(BEAT)),
        *((subjects.gone, data) for _, data in wrong_messages(GONE)),
        *((controller_beat("other", prefix), data) for _, data in wrong_messages(CONTROLLER_BEAT)),
        *((controller_beat("fuzzed", prefix), data) for _, data in wrong_messages(CONTROLLER_BEAT)),
    ]
    parse_as(packed(BEAT), Beat)
    async with Operator(nats_url, prefix=prefix) as operator:
        for number, (subject, data) in enumerate(told):
            await stranger.client.publish(subject, data)
            if number % 150 == 0:
                await stranger.client.flush()
                operator.view()
                assert await page(fleet) == b"200"
        await stranger.client.publish(subjects.beat("s"), packed(BEAT))
        await stranger.client.publish(controller_beat("other", prefix), packed(CONTROLLER_BEAT))
        await becomes(
            lambda: [server.server for server in operator.view().servers] == ["s"], what=lambda: str(operator.view())
        )
    assert await stranger.ask(controller("fuzzed", prefix), packed(ORDERS[2]))
    assert_no_errors(caplog)


async def page(fleet: Controller) -> bytes:
    """The status of the metrics page."""
    endpoint = fleet._pages._endpoint
    assert endpoint is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), BOUND_S)
        return answer.split(b" ", 2)[1]
    finally:
        writer.close()
        await writer.wait_closed()
