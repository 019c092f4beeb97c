"""Wrong messages to everything that a server listens on: each is answered, nothing breaks, nothing is left (P60)."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from byte_fuzz import CORPUS, random_inputs
from fuzz_stage import ENV, Site, Stranger, a_site, a_stranger, assert_no_errors
from mutations import EXTREMES, bombs, packed, wrong_messages

from envbus.bus.codec import decode_map, encode
from envbus.bus.embedded import EmbeddedNats
from envbus.bus.messages import parse
from envbus.bus.transfer import cut, pack_body

CALL = encode({"input": {"prompt": [], "example_id": 1}, "model": "m"})
PARTS = cut(pack_body(CALL), 16).model_dump()
RUN: dict[str, Any] = {
    "v": 1,
    "t": "run",
    "job": "j",
    "attempt": 1,
    "client": "mallory",
    "call": "rollout",
    "size": 1,
    "start_by": 4e9,
    "fingerprint": None,
    "grant": "1",
    "encoding": "",
    "body": CALL,
}
DIRECT: list[dict[str, Any]] = [
    RUN,
    {key: value for key, value in RUN.items() if key != "body"} | {"upload": PARTS},
    {"v": 1, "t": "part", "job": "j", "client": "mallory", "index": 0, "data": CALL[:16]},
    {"v": 1, "t": "check", "client": "mallory", "jobs": ["j", "k"]},
    {"v": 1, "t": "fetch", "client": "mallory", "job": "j", "index": 0},
    {"v": 1, "t": "cancel", "client": "mallory", "jobs": ["j"]},
    {"v": 1, "t": "done", "client": "mallory", "jobs": ["j"]},
    {"v": 1, "t": "pass", "client": "mallory", "grant": "1"},
]
PLAIN: dict[str, Any] = {
    "input": {"prompt": [], "example_id": 1},
    "model": "m",
    "client": {"api_base_url": "http://127.0.0.1:9/v1", "api_key_var": None},
    "sampling_args": {},
    "max_retries": 0,
    "state_columns": [],
}
WAIT = {"v": 1, "t": "wait", "client": "mallory", "n": 3, "priority": 0, "fingerprint": None}
CONTROL = {"v": 1, "t": "control", "action": "log_level", "level": "WARNING"}
LOGS = {"v": 1, "t": "logs_request", "server": "a", "lines": 5, "after": 0}


@pytest.fixture
async def site(nats_url: str, prefix: str) -> AsyncIterator[Site]:
    async with a_site(nats_url, prefix) as site:
        yield site


@pytest.fixture
async def stranger(nats_url: str, site: Site) -> AsyncIterator[Stranger]:
    async with a_stranger(nats_url) as stranger:
        yield stranger


def questions(subject: str, *valid: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    for message in valid:
        for what, data in wrong_messages(message):
            yield f"{message.get('t')}: {what}", subject, data


def with_jobs_of_their_own(asked: Iterator[tuple[str, str, bytes]]) -> Iterator[tuple[str, str, bytes]]:
    """Mutants of one job would mostly hear that it is there already."""
    for number, (what, subject, data) in enumerate(asked):
        yield f"{number} {what}", subject, data.replace(b"\xa3job\xa1j", b"\xa3job\xa5" + b"%05d" % number)


def assert_all_answered(answers: dict[str, bytes | None]) -> None:
    """Each with a message of the protocol, a plain reply, or "nobody is there"."""
    silent = [what for what, answer in answers.items() if answer is None]
    assert not silent, f"{len(silent)} of {len(answers)} had no answer: {silent[:10]}"
    for what, answer in answers.items():
        if answer and not answer.startswith(b"{"):
            fields = decode_map(answer)
            assert "ok" in fields or parse(answer), what


async def test_wrong_jobs_in_the_queue_group(site: Site, stranger: Stranger, caplog: pytest.LogCaptureFixture) -> None:
    upload = DIRECT[1]
    asked = with_jobs_of_their_own(questions(site.subjects.rollout, RUN, upload, PLAIN, *DIRECT[2:5]))
    answers = await stranger.ask_all(asked)
    assert_all_answered(answers)
    await stranger.client.close()
    await site.works_and_is_empty()
    assert_no_errors(caplog)


async def test_wrong_messages_to_one_server(site: Site, stranger: Stranger, caplog: pytest.LogCaptureFixture) -> None:
    answers = await stranger.ask_all(with_jobs_of_their_own(questions(site.server_subject, *DIRECT, WAIT)))
    assert_all_answered(answers)
    await stranger.client.close()
    await site.works_and_is_empty()
    assert_no_errors(caplog)


async def test_wrong_parts_of_an_input_that_is_awaited(
    site: Site, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    """The upload holds a slot; wrong parts end nothing but themselves, and the right ones complete it."""
    accepted = await stranger.ask(site.subjects.rollout, packed(DIRECT[1]))
    assert accepted
    assert decode_map(accepted)["t"] == "accepted"
    assert_all_answered(await stranger.ask_all(questions(site.server_subject, DIRECT[2])))
    assert_all_answered(await stranger.ask_all(questions(site.server_subject, *DIRECT[3:5])))
    for index in range(PARTS["parts"]):
        part = DIRECT[2] | {"index": index, "data": CALL[index * 16 : (index + 1) * 16]}
        await stranger.ask(site.server_subject, packed(part))
    for _ in range(500):
        status = await stranger.ask(site.server_subject, packed(DIRECT[3]))
        assert status
        if decode_map(status)["done"] == ["j"]:
            break
    else:
        pytest.fail("the job did not end")
    assert_all_answered(await stranger.ask_all(questions(site.server_subject, *DIRECT[4:])))
    await site.works_and_is_empty()
    assert_no_errors(caplog)


async def test_wrong_words_about_waiting_info_and_examples(
    site: Site, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [
        *questions(site.subjects.wait, WAIT, *DIRECT[3:5]),
        *questions(site.subjects.info, {"v": 1, "t": "info"}),
        *questions(site.subjects.examples, {"v": 1, "t": "examples", "start": 0, "count": 2}, *DIRECT[3:5]),
    ]
    assert_all_answered(await stranger.ask_all((f"{n} {what}", to, data) for n, (what, to, data) in enumerate(asked)))
    await stranger.client.close()
    await site.works_and_is_empty()
    assert_no_errors(caplog)


async def test_wrong_orders(site: Site, stranger: Stranger, caplog: pytest.LogCaptureFixture) -> None:
    asked = []
    for subject in (site.subjects.ctl(site.server.server_id), site.subjects.ctl_all):
        asked += questions(subject, CONTROL, LOGS, {"v": 1, "t": "status_request"}, *DIRECT[3:5])
    asked += [(what, subject, data) for subject in micro_subjects(site) for what, data in wrong_messages(LOGS)]
    assert_all_answered(await stranger.ask_all((f"{n} {what}", to, data) for n, (what, to, data) in enumerate(asked)))
    await site.works_and_is_empty()
    assert_no_errors(caplog)


def micro_subjects(site: Site) -> list[str]:
    return [f"$SRV.{verb}.{ENV}.{site.server.server_id}" for verb in ("PING", "INFO", "STATS")]


@pytest.mark.parametrize("seed", [1, 2])
async def test_noise_everywhere(site: Site, stranger: Stranger, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """Mutants of all messages and of bodies, bombs, and messages that are right but on the wrong subject."""
    rng = random.Random(seed)
    subjects = [
        *(site.subjects.rollout, site.subjects.info, site.subjects.examples, site.subjects.wait),
        *(site.server_subject, site.subjects.ctl_all),
    ]
    mutants = random_inputs(rng, [*map(packed, [*DIRECT, PLAIN, WAIT, LOGS]), *CORPUS])
    noise = [*(next(mutants) for _ in range(1_500)), *(bomb for bomb in bombs().values() if len(bomb) < 900_000)]
    asked = ((str(number), rng.choice(subjects), data) for number, data in enumerate(noise))
    assert_all_answered(await stranger.ask_all(asked))
    await stranger.client.close()
    await site.works_and_is_empty()
    assert_no_errors(caplog)


async def test_a_body_with_one_thing_wrong_fails_its_job_alone(site: Site, stranger: Stranger) -> None:
    """P60: the job's outcome names what is wrong; fields that nobody knows are no matter."""
    for number, (name, extreme) in enumerate([(name, extreme) for name in PLAIN for extreme in EXTREMES]):
        body = packed(PLAIN | {name: extreme})
        if len(body) > 500_000:
            continue
        await stranger.ask(site.subjects.rollout, packed(RUN | {"job": f"b{number}", "body": body}))
        await stranger.ask(site.server_subject, packed(DIRECT[5] | {"jobs": [f"b{number}"]}))
    await site.works_and_is_empty()


REPLIES = [b"", b"x", b"$JS.API", b"_INBOX", b"_INBOX.", b"_INBOX..", b"_INBOX.>", b"_INBOX.*", b"_INBOX.\xff\xfe"]


@pytest.mark.parametrize("header", [b"", b"NATS/1.0", b"NATS/1.0\r\n\r\n", b"X", b"NATS/1.0 \xff\xff\xff\r\n\r\n"])
async def test_reply_subjects_and_headers_that_are_none(
    site: Site, session_nats: EmbeddedNats, caplog: pytest.LogCaptureFixture, header: bytes
) -> None:
    """nats-server passes them on unread; the connection that hears them must go on hearing."""
    reconnects = site.server._bus.connection.stats.reconnects
    subjects = [site.subjects.rollout, site.server_subject, site.subjects.wait, site.subjects.ctl_all]
    data = packed(DIRECT[3])
    lines = []
    for subject in subjects:
        for reply in REPLIES:
            command = b"HPUB %s %s %d %d" if header else b"PUB %s %s %d"
            sizes = (len(header), len(header) + len(data)) if header else (len(data),)
            lines.append(command % (subject.encode(), reply, *sizes) + b"\r\n" + header + data + b"\r\n")
    for odd in (b"%FF", b"\xff", b"a%00"):
        lines.append(b"PUB %s.%s.beat.x 0\r\n\r\n" % (site.subjects.prefix.encode(), odd))
    said = await asyncio.to_thread(publish_raw, session_nats.url, b"".join(lines))
    assert b"-ERR" not in said, said
    await site.works_and_is_empty()
    assert site.server._bus.connection.stats.reconnects == reconnects
    assert_no_errors(caplog)


def publish_raw(url: str, commands: bytes) -> bytes:
    """Say these bytes to NATS; returns what it said until it answered a ping."""
    match = re.fullmatch(r"nats://([^:]+):(\d+)", url)
    assert match
    with socket.create_connection((match[1], int(match[2])), timeout=10) as connection:
        connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n' + commands + b"PING\r\n")
        said = b""
        while b"PONG" not in said and b"-ERR" not in said:
            said += connection.recv(4096)
        return said


async def test_a_million_wrong_items_are_refused_at_once(site: Site, stranger: Stranger) -> None:
    """Listing what is wrong with each of them would stop the bus thread for seconds and take 500 MB."""
    bad = packed({"v": 1, "t": "check", "client": "c", "jobs": [1] * 900_000})
    answers = await stranger.ask_all((str(n), site.server_subject, bad) for n in range(5))
    for answer in answers.values():
        assert answer
        assert decode_map(answer)["code"] == "bad_request"
    await site.works_and_is_empty()


async def test_a_job_of_another_client_is_refused(site: Site, stranger: Stranger) -> None:
    """A server that had said nothing would be asked again for ever."""
    mine = DIRECT[1] | {"job": "mine"}
    await stranger.ask(site.subjects.rollout, packed(mine))
    for subject in (site.subjects.rollout, site.server_subject):
        answer = await stranger.ask(subject, packed(mine | {"client": "eve"}))
        assert answer
        assert decode_map(answer)["code"] == "bad_request"
    await stranger.ask(site.server_subject, packed(DIRECT[5] | {"jobs": ["mine"]}))
    await site.works_and_is_empty()
