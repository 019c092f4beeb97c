"""A server that lies to a client: each call ends with a result or a typed error, nothing hangs or is left (P60)."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fake_server import RESULT, FakeServer, Say, a_fake_server
from fuzz_stage import BOUND_S, a_client, assert_no_errors, becomes
from mutations import packed, wrong_messages

from envbus import NATSEnvClient
from envbus.bus.codec import decode_map, encode
from envbus.errors import BadRequestError, CodecError, EnvbusError, ResultTooLargeError

AT_ONCE = 48


@pytest.fixture
async def fake(nats_url: str, prefix: str) -> AsyncIterator[FakeServer]:
    async with a_fake_server(nats_url, prefix) as fake:
        yield fake


@pytest.fixture
async def client(nats_url: str, prefix: str, fake: FakeServer) -> AsyncIterator[NATSEnvClient]:
    async with a_client(nats_url, prefix, part_retries=1, max_attempts=1, max_result_bytes=2**22) as client:
        yield client


async def ended(call: Awaitable[Any]) -> Any:
    """The call's result or its typed error; anything else, and no end, fails the test."""
    try:
        return await asyncio.wait_for(call, BOUND_S)
    except EnvbusError as error:
        return error


def rollout(client: NATSEnvClient, **fields: Any) -> Awaitable[Any]:
    item: Any = {"prompt": [], "example_id": 1} | fields
    return ended(client.run_rollout(item, None, "m"))


async def nothing_left(client: NATSEnvClient) -> None:
    session, bus = client._session, client._bus
    assert session is not None
    assert bus is not None

    def tables() -> dict[str, int]:
        return {
            "jobs": len(session._jobs),
            "pending": len(session._dispatch.pending()),
            "attempts": len(session._attempts),
            "holders": len(session._attempts.holders()),
            "window": session._large._transfers._window._value - client._settings.pull_window,
        }

    await becomes(lambda: not any(tables().values()), what=lambda: str(tables()))


async def honest(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
    await say(fake.accepted(run))
    await say(fake.result(run))


async def still_works(client: NATSEnvClient, fake: FakeServer) -> None:
    fake.scripts = {"run": honest}
    output = await rollout(client)
    assert output == {"example_id": 1, "reward": 1.0}, output
    await nothing_left(client)


Answer = Callable[[FakeServer, dict[str, Any]], dict[str, Any]]
REPLIES_TO_RUN: dict[str, Answer] = {
    "accepted": FakeServer.accepted,
    "busy": FakeServer.busy,
    "result": FakeServer.result,
    "announce": FakeServer.announce,
    "failure": FakeServer.failure,
    "grant": lambda fake, run: fake.grant(),
    "status": lambda fake, run: fake.status(running=[run["job"]]),
}


@pytest.mark.parametrize("kind", REPLIES_TO_RUN)
async def test_wrong_replies_to_a_job(
    client: NATSEnvClient, fake: FakeServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """One wrong reply to each job, and the right ones after it."""
    seen: set[str] = set()
    wrong = [data for _, data in wrong_messages(REPLIES_TO_RUN[kind](fake, {"job": "j", "attempt": 1}))]

    async def lie_once(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        if run["job"] not in seen and len(seen) < len(wrong):
            await say(wrong[len(seen)])
        seen.add(run["job"])
        await honest(fake, run, say)

    async def grant_all(fake: FakeServer, wait: dict[str, Any], say: Say) -> None:
        for number in range(wait["n"]):
            await say(fake.grant(number))

    async def parts_of_a_result(fake: FakeServer, fetch: dict[str, Any], say: Say) -> None:
        await say(fake.part_reply(fetch))

    fake.scripts = {"run": lie_once, "fetch": parts_of_a_result, "wait": grant_all}
    outcomes = await in_turn(len(wrong), lambda: rollout(client))
    assert len(seen) >= len(wrong)
    assert sum(isinstance(outcome, dict) for outcome in outcomes) > 0.5 * len(wrong)
    await still_works(client, fake)
    assert_no_errors(caplog)


async def in_turn(count: int, call: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Make so many calls, a bounded number at a time."""
    outcomes: list[Any] = []
    numbers = iter(range(count))

    async def work() -> None:
        for _ in numbers:
            outcomes.append(await call())

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return outcomes


async def test_wrong_parts_of_a_result(
    client: NATSEnvClient, fake: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wrong part ends its call with an error, or was not wrong enough to matter."""
    mutants: dict[str, bytes] = {}
    wrong = list(wrong_messages(fake.part_reply({"job": "j", "index": 0})))

    async def announce(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        if len(mutants) < len(wrong):
            mutants[run["job"]] = wrong[len(mutants)][1]
        await say(fake.accepted(run))
        await say(fake.announce(run))

    async def lie(fake: FakeServer, fetch: dict[str, Any], say: Say) -> None:
        honest_part = fake.part_reply(fetch)
        await say(mutants.get(fetch["job"], b"") if fetch["index"] == 0 else honest_part)

    fake.scripts = {"run": announce, "fetch": lie}
    outcomes = await in_turn(len(wrong), lambda: rollout(client))
    assert any(isinstance(outcome, CodecError | BadRequestError) for outcome in outcomes)
    await still_works(client, fake)
    assert_no_errors(caplog)


async def test_wrong_answers_to_checks(
    client: NATSEnvClient, fake: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Every wrong status in turn while one job runs; its result still counts."""
    wrong = [data for _, data in wrong_messages(fake.status(running=["j"], failed=[]))]
    accepted: list[tuple[dict[str, Any], Say]] = []
    lies = iter(wrong)

    async def hold(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        await say(fake.accepted(run))
        accepted.append((run, say))

    async def lie(fake: FakeServer, check: dict[str, Any], say: Say) -> None:
        await say(next(lies, b""))

    fake.scripts = {"run": hold, "check": lie}
    calling = asyncio.ensure_future(rollout(client))
    await becomes(lambda: bool(accepted), what=lambda: "not accepted")
    session, bus = client._session, client._bus
    assert session is not None
    assert bus is not None
    run, say = accepted[0]
    for _ in wrong:
        await bus.thread.run(session._checks._check(fake.server, [run["job"]]))
    assert next(lies, None) is None
    await say(fake.result(run))
    assert await calling == {"example_id": 1, "reward": 1.0}
    await still_works(client, fake)
    assert_no_errors(caplog)


async def test_wrong_words_in_the_waiting_line(
    client: NATSEnvClient, fake: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong grants and a flood of right ones: more grants than jobs are passed back."""

    async def busy_then_honest(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        if run.get("grant") is None:
            await say(fake.busy(run))
        else:
            await honest(fake, run, say)

    lies = [data for message in (fake.grant(), fake.ok()) for _, data in wrong_messages(message)]

    async def lie(fake: FakeServer, wait: dict[str, Any], say: Say) -> None:
        for data in lies:
            await say(data)
        lies.clear()
        for number in range(200):
            await say(fake.grant(number))

    fake.scripts = {"run": busy_then_honest, "wait": lie}
    outcomes = await asyncio.gather(*(rollout(client) for _ in range(20)))
    assert all(outcome == {"example_id": 1, "reward": 1.0} for outcome in outcomes), outcomes
    await becomes(lambda: fake.kinds().count("pass") >= 100, what=lambda: str(fake.kinds()))
    await still_works(client, fake)
    assert_no_errors(caplog)


async def test_wrong_answers_about_the_env(
    client: NATSEnvClient, fake: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    page = encode({"examples": [1, None, "row"]})
    told = [*wrong_messages(fake.examples()), ("rows", packed(fake.examples() | {"body": page}))]
    infos = list(wrong_messages(fake.info()))
    asked = iter([data for _, data in told])
    asked_info = iter([data for _, data in infos])

    async def lie(fake: FakeServer, request: dict[str, Any], say: Say) -> None:
        await say(next(asked, b""))

    async def lie_about_it(fake: FakeServer, request: dict[str, Any], say: Say) -> None:
        await say(next(asked_info, b""))

    fake.scripts = {"examples": lie, "info": lie_about_it}
    outcomes = await in_turn(len(told), lambda: ended(client.examples()))
    for outcome in outcomes:
        assert isinstance(outcome, EnvbusError) or all(isinstance(row, dict) for row in outcome), outcome
    await in_turn(len(infos), lambda: ended(client.info()))
    await still_works(client, fake)
    assert_no_errors(caplog)


@pytest.mark.parametrize("lie", [{"total": 10, "start": 10, "rows": ()}, {"total": 10, "rows": ()}])
async def test_pages_without_rows_end_the_reading(client: NATSEnvClient, fake: FakeServer, lie: dict[str, Any]) -> None:
    """It would ask for the same page for ever."""

    async def empty(fake: FakeServer, request: dict[str, Any], say: Say) -> None:
        await say(fake.examples(**lie))

    fake.scripts = {"examples": empty}
    with pytest.raises(CodecError, match="holds none"):
        await asyncio.wait_for(client.examples(), BOUND_S)


ANNOUNCEMENTS: dict[str, tuple[dict[str, Any], type[EnvbusError]]] = {
    "10 GB": ({"size": 10 * 2**30, "parts": 20_480, "part_bytes": 2**19, "raw_size": 1}, ResultTooLargeError),
    "10 GB unpacked": ({"encoding": "zstd", "raw_size": 10 * 2**30}, ResultTooLargeError),
    "a part per byte": ({"size": 2**22, "parts": 2**22, "part_bytes": 1, "raw_size": 2**22}, CodecError),
    "2^62 parts": ({"parts": 2**62}, CodecError),
    "another checksum": ({"checksum": 7}, CodecError),
    "another encoding": ({"encoding": "zstd"}, CodecError),
}


@pytest.mark.parametrize("name", ANNOUNCEMENTS)
async def test_announcements_that_lie(client: NATSEnvClient, fake: FakeServer, name: str) -> None:
    """No memory is taken for what has not come."""
    lies, expected = ANNOUNCEMENTS[name]

    async def announce(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        await say(fake.accepted(run))
        await say(fake.announce(run, **lies))

    async def part(fake: FakeServer, fetch: dict[str, Any], say: Say) -> None:
        await say(fake.part_reply(fetch))

    fake.scripts = {"run": announce, "fetch": part}
    tracemalloc.start()
    outcome = await rollout(client)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(outcome, expected), outcome
    assert peak_bytes < 32 * 2**20
    await still_works(client, fake)


async def test_parts_that_never_come(client: NATSEnvClient, fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try is bounded, and so are the tries: the server counts as lost."""

    async def announce(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        await say(fake.accepted(run))
        await say(fake.announce(run))

    async def say_done(fake: FakeServer, check: dict[str, Any], say: Say) -> None:
        await say(fake.status(done=check["jobs"]))

    fake.scripts = {"run": announce, "check": say_done}
    monkeypatch.setattr("envbus.client.transfers.PROBE_TIMEOUT_S", 0.3)
    outcome = await rollout(client)
    assert isinstance(outcome, EnvbusError), outcome
    assert "could not be collected" in str(outcome)
    await still_works(client, fake)


@pytest.mark.parametrize("code", ["result_lost", "bad_request"])
async def test_two_servers_claim_one_job(client: NATSEnvClient, fake: FakeServer, code: str) -> None:
    """The second is told to stop; what it announces does not keep the first one's result away."""

    async def both(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        await say(fake.accepted(run, server="f" * 32))
        await say(fake.accepted(run))
        await say(fake.announce(run))
        await say(fake.announce(run) | {"server": "f" * 32})

    async def part(fake: FakeServer, fetch: dict[str, Any], say: Say) -> None:
        await say({"v": 1, "t": "failure", "code": code, "message": "cancelled", "origin": fake.server})

    fake.scripts = {"run": both, "fetch": part}
    honest_one = await fake.client.subscribe(fake.subjects.server("f" * 32), cb=answer_as("f" * 32, fake))
    assert await rollout(client) == {"example_id": 1, "reward": 1.0}
    await honest_one.unsubscribe()
    await still_works(client, fake)


def answer_as(server: str, fake: FakeServer) -> Callable[[Any], Awaitable[None]]:
    """An honest server that has the result of every job it is asked about."""

    async def answer(message: Any) -> None:
        fields = decode_map(message.data)
        if fields["t"] == "fetch":
            await message.respond(packed(fake.part_reply(fields)))
        elif fields["t"] == "check":
            await message.respond(packed(fake.status(done=fields["jobs"]) | {"server": server}))
        else:
            await message.respond(packed(fake.ok()))

    return answer


ORIGINS = ["", "a b", "x\r\nPUB evil 0\r\n\r\n", "\ud800", "y" * 100_000, ">", "*"]


@pytest.mark.parametrize("code", ["server_stopping", "remote", "no_such_code", "cancelled", "\ud800"])
@pytest.mark.parametrize("origin", ORIGINS)
async def test_failures_of_nobody(
    client: NATSEnvClient, fake: FakeServer, caplog: pytest.LogCaptureFixture, code: str, origin: str
) -> None:
    """Their origin is shown, bounded, and never becomes a subject that one publishes to."""

    async def fail(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        failure = fake.failure(run, code) | {"origin": origin, "message": "m\ud800" * 50_000}
        await say({key: value for key, value in failure.items() if key != "server"})

    fake.scripts = {"run": fail}
    outcome = await rollout(client)
    assert isinstance(outcome, EnvbusError)
    assert len(str(outcome)) < 10_000
    str(outcome).encode()
    await still_works(client, fake)
    assert_no_errors(caplog)


async def test_a_result_after_a_cancel_and_results_twice(client: NATSEnvClient, fake: FakeServer) -> None:
    held: list[tuple[dict[str, Any], Say]] = []

    async def hold(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        await say(fake.accepted(run))
        held.append((run, say))

    fake.scripts = {"run": hold}
    calling = asyncio.ensure_future(rollout(client))
    await becomes(lambda: bool(held), what=lambda: "not heard")
    calling.cancel()
    await asyncio.wait([calling])
    await becomes(lambda: "cancel" in fake.kinds(), what=lambda: str(fake.kinds()))
    run, say = held[0]
    for _ in range(3):
        await say(fake.result(run))
        await say(fake.failure(run))
        await say(fake.announce(run))
    await still_works(client, fake)


BODIES = [b"", b"\xc1", RESULT[:-1], encode({"output": 5}), encode({"outputs": []}), encode([]), b"\x91" * 100_000]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_bodies_that_are_no_result(client: NATSEnvClient, fake: FakeServer, body: bytes) -> None:
    async def answer(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        await say(fake.accepted(run))
        await say(fake.result(run, body))

    fake.scripts = {"run": answer}
    assert isinstance(await rollout(client), CodecError)
    await still_works(client, fake)


@pytest.mark.parametrize("outputs", [[], [{}], [{}, {}, {}], [{}, 5]])
async def test_a_group_with_other_outputs_than_inputs(
    client: NATSEnvClient, fake: FakeServer, outputs: list[Any]
) -> None:
    async def answer(fake: FakeServer, run: dict[str, Any], say: Say) -> None:
        await say(fake.result(run, encode({"outputs": outputs})))

    fake.scripts = {"run": answer}
    items: list[Any] = [{"prompt": [], "example_id": n} for n in range(2)]
    outcome = await ended(client.run_group(items, None, "m"))
    assert isinstance(outcome, CodecError), outcome
