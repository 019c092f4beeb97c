"""The connection against a real nats-server: requests, limits, outages, permissions, the end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
import psutil
import pytest
from nats.aio.client import Client

from envbus.bus import connection as connection_module
from envbus.bus import dialer
from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.bus import Bus
from envbus.bus.connection import Connection, Listener
from envbus.bus.embedded import EmbeddedNats
from envbus.errors import (
    BusAuthError,
    BusClosedError,
    BusPermissionError,
    NoServerError,
    PayloadTooLargeError,
    UsageError,
)


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Connection]:
    connection = Connection(resolve_bus_options(url, **options), name="test")
    await connection.open(timeout_s=20)
    try:
        yield connection
    finally:
        await connection.close()


async def echo(connection: Connection, subject: str) -> None:
    """Answer each request with its own bytes."""
    await connection.subscribe(subject, lambda message: connection.send(message.reply, message.data))


async def eventually(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def hears_itself(connection: Connection) -> None:
    """Wait until all that this connection sent before has reached nats-server: a request to itself is a barrier."""
    token = connection.inbox.route(lambda message: connection.send(message.reply, b""))
    await connection.request(connection.inbox.reply_subject(token), b"", timeout_s=20)


async def test_a_request_gets_its_own_reply(nats_url: str, prefix: str) -> None:
    async with connected(nats_url) as asks, connected(nats_url) as answers:
        await echo(answers, f"{prefix}.echo")
        await answers.request(f"{prefix}.echo", b"", timeout_s=20)  # the subscription has arrived
        bodies = [str(number).encode() for number in range(200)]
        replies = await asyncio.gather(*(asks.request(f"{prefix}.echo", body, timeout_s=20) for body in bodies))
        assert replies == bodies
        assert len(asks.inbox) == 0


async def test_nobody_there_is_known_at_once(nats_url: str, prefix: str) -> None:
    """P01, P59: NATS says so itself (503); no timeout has to pass."""
    async with connected(nats_url) as connection:
        async with asyncio.timeout(15):
            with pytest.raises(NoServerError, match=prefix):
                await connection.request(f"{prefix}.nobody", b"", timeout_s=30)
        assert len(connection.inbox) == 0


async def test_silence_ends_with_the_timeout_and_leaves_nothing(nats_url: str, prefix: str) -> None:
    """P37: nor does a cancel."""
    async with connected(nats_url) as connection:
        await connection.subscribe(f"{prefix}.silent", lambda message: None)
        with pytest.raises(TimeoutError):
            await connection.request(f"{prefix}.silent", b"", timeout_s=0.1)
        call = asyncio.create_task(connection.request(f"{prefix}.silent", b"", timeout_s=30))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(connection.inbox) == 0


async def test_the_size_limit_is_read_from_the_live_connection(prefix: str) -> None:
    """P05, P37: exactly at the limit passes, one byte more is refused with both sizes, and nothing is left."""
    async with EmbeddedNats(config="max_payload: 2000") as nats, connected(nats.url) as connection:
        assert connection.max_payload == 2000
        await echo(connection, f"{prefix}.echo")
        assert await connection.request(f"{prefix}.echo", b"x" * 2000, timeout_s=20) == b"x" * 2000
        for _ in range(50):
            with pytest.raises(PayloadTooLargeError, match=r"2,001 bytes.*2,000 bytes"):
                await connection.request(f"{prefix}.echo", b"x" * 2001, timeout_s=20)
        assert len(connection.inbox) == 0
        assert connection.is_up


async def test_sends_keep_their_order(nats_url: str, prefix: str) -> None:
    async with connected(nats_url) as connection:
        seen: list[bytes] = []
        await connection.subscribe(f"{prefix}.x", lambda message: seen.append(message.data))
        sent = [str(number).encode() for number in range(500)]
        for data in sent:
            connection.send(f"{prefix}.x", data)
        await eventually(lambda: len(seen) == len(sent))
        assert seen == sent


async def test_what_was_sent_before_close_goes_out(nats_url: str, prefix: str) -> None:
    """P06: a cancel issued just before close() reaches the server."""
    async with connected(nats_url) as hears:
        seen: list[bytes] = []
        await hears.subscribe(f"{prefix}.x", lambda message: seen.append(message.data))
        await hears.request(
            hears.inbox.reply_subject(hears.inbox.route(lambda m: hears.send(m.reply, b""))), b"", timeout_s=20
        )
        async with connected(nats_url) as sends:
            for number in range(300):
                sends.send(f"{prefix}.x", str(number).encode())
        await eventually(lambda: len(seen) == 300)


async def test_a_limited_subscription_gets_no_more_than_its_limit(nats_url: str, prefix: str) -> None:
    """P15: nats-server itself stops there; the next request gets a 503 and not a queue."""
    async with connected(nats_url) as asks, connected(nats_url) as answers:
        seen: list[bytes] = []

        def take(message: Any) -> None:
            seen.append(message.data)
            answers.send(message.reply, b"taken")

        await answers.subscribe_limited(f"{prefix}.work", take, queue="workers", limit=3)
        await hears_itself(answers)
        outcomes = await asyncio.gather(
            *(asks.request(f"{prefix}.work", b"", timeout_s=20) for _ in range(8)), return_exceptions=True
        )
        assert outcomes.count(b"taken") == len(seen) == 3
        assert sum(isinstance(outcome, NoServerError) for outcome in outcomes) == 5


async def test_leave_handles_what_is_under_way(nats_url: str, prefix: str) -> None:
    async with connected(nats_url) as asks, connected(nats_url) as answers:
        seen: list[bytes] = []
        subscription = await answers.subscribe(f"{prefix}.x", lambda message: seen.append(message.data))
        await answers.publish(f"{prefix}.x", b"first")
        await eventually(lambda: len(seen) == 1)
        await asks.publish(f"{prefix}.x", b"second")
        await asks.request(
            asks.inbox.reply_subject(asks.inbox.route(lambda m: asks.send(m.reply, b""))), b"", timeout_s=20
        )
        await answers.leave(subscription)
        assert seen == [b"first", b"second"]
        with pytest.raises(NoServerError):
            await asks.request(f"{prefix}.x", b"", timeout_s=20)


async def test_what_was_left_in_an_outage_is_not_subscribed_to_again(own_nats: EmbeddedNats, prefix: str) -> None:
    """P15: else a queue group would go on giving messages to who has left it."""
    async with connected(own_nats.url) as connection:
        seen: list[Any] = []
        left = await connection.subscribe(f"{prefix}.x", seen.append, queue="workers")
        await hears_itself(connection)
        await own_nats.kill()
        await eventually(lambda: not connection.is_up)
        await connection.leave(left)
        await own_nats.restart()
        with pytest.raises(NoServerError):
            await connection.request(f"{prefix}.x", b"", timeout_s=20)
        assert seen == []


async def test_what_is_subscribed_to_while_a_connection_is_made_is_not_forgotten(
    own_nats: EmbeddedNats, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: as another part of the process may."""
    async with connected(own_nats.url) as connection:
        await echo(connection, f"{prefix}.first")
        restore = connection._restore

        async def restored(subscription: Any) -> None:
            await restore(subscription)
            if subscription.subject.endswith("first"):
                await echo(connection, f"{prefix}.second")

        monkeypatch.setattr(connection, "_restore", restored)
        assert connection._client is not None
        await connection._client.close()
        await eventually(lambda: connection.stats.rebuilds == 1)
        assert await connection.request(f"{prefix}.second", b"x", timeout_s=20) == b"x"


async def test_an_outage_is_told_and_survived(own_nats: EmbeddedNats, prefix: str) -> None:
    """P10, P24: subscriptions are back, a request made meanwhile is answered afterwards."""
    told: list[str] = []
    outages: list[float] = []
    async with connected(own_nats.url) as connection:
        connection.listen(Listener(lambda: told.append("down"), outages.append))
        await echo(connection, f"{prefix}.echo")
        await own_nats.kill()
        await eventually(lambda: told == ["down"])
        assert not connection.is_up
        assert await connection.publish(f"{prefix}.echo", b"") is False
        call = asyncio.create_task(connection.request(f"{prefix}.echo", b"later", timeout_s=15))
        done, _ = await asyncio.wait({call}, timeout=0.3)
        assert not done
        await own_nats.restart()
        assert await call == b"later"
        assert len(outages) == 1
        assert outages[0] >= 0.3
        assert connection.stats.reconnects == 1
        assert len(connection.inbox) == 0


async def test_an_error_that_closes_nats_py_for_good_is_survived(own_nats: EmbeddedNats, prefix: str) -> None:
    """P10: any -ERR of the protocol; a new client takes over with the same subscriptions and inbox."""
    async with connected(own_nats.url) as connection:
        await echo(connection, f"{prefix}.echo")
        await connection.request(f"{prefix}.echo", b"", timeout_s=20)
        assert connection._client is not None
        connection._client._transport.write(b"NONSENSE\r\n")
        await eventually(lambda: connection.stats.rebuilds + connection.stats.reconnects > 0)
        assert await connection.request(f"{prefix}.echo", b"again", timeout_s=20) == b"again"


async def test_files_that_cannot_be_read_for_a_moment_do_not_end_the_reconnecting(
    own_nats: EmbeddedNats, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: TLS files that are being renewed while the connection is made anew."""
    tries: list[int] = []
    read = BusOptions.nats_kwargs

    def renewed(options: BusOptions) -> dict[str, Any]:
        tries.append(1)
        if len(tries) <= 2:
            raise UsageError("TLS files ca.pem: No such file or directory")
        return read(options)

    async with connected(own_nats.url) as connection:
        await echo(connection, f"{prefix}.echo")
        monkeypatch.setattr(BusOptions, "nats_kwargs", renewed)
        assert connection._client is not None
        await connection._client.close()
        await eventually(lambda: connection.stats.rebuilds == 1)
        assert await connection.request(f"{prefix}.echo", b"again", timeout_s=20) == b"again"
        assert len(tries) == 3


async def test_a_connection_that_hears_nothing_is_made_anew(
    own_nats: EmbeddedNats, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P10: it reads as up; only a message to oneself tells."""
    monkeypatch.setattr(connection_module, "LOOPBACK_INTERVAL_S", 0.1)
    monkeypatch.setattr(connection_module, "LOOPBACK_TIMEOUT_S", 0.3)
    family = psutil.Process().children(recursive=True)
    server = next(
        process
        for process in family
        if process.name() == "nats-server" and any(c.laddr.port == own_nats.port for c in process.net_connections())
    )
    async with connected(own_nats.url) as connection:
        await echo(connection, f"{prefix}.echo")
        assert await connection.request(f"{prefix}.echo", b"1", timeout_s=20) == b"1"
        server.send_signal(signal.SIGSTOP)
        try:
            await eventually(lambda: not connection.is_up, timeout_s=20)
        finally:
            server.send_signal(signal.SIGCONT)
        assert await connection.request(f"{prefix}.echo", b"2", timeout_s=10) == b"2"
        assert connection.stats.reconnects >= 1


async def test_close_ends_pending_requests(nats_url: str, prefix: str) -> None:
    """P11: at once, and everything after it says so too; a second close is harmless."""
    async with connected(nats_url) as connection:
        await connection.subscribe(f"{prefix}.silent", lambda message: None)
        calls = [asyncio.create_task(connection.request(f"{prefix}.silent", b"", timeout_s=30)) for _ in range(3)]
        await asyncio.sleep(0)
        await connection.close()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, BusClosedError)
        with pytest.raises(BusClosedError):
            await connection.request(f"{prefix}.silent", b"", timeout_s=1)
        with pytest.raises(BusClosedError):
            await connection.publish(f"{prefix}.silent", b"")
        with pytest.raises(BusClosedError):
            await connection.wait_up()
        await connection.close()


async def test_close_during_an_outage_ends_requests_that_wait_for_nats(own_nats: EmbeddedNats, prefix: str) -> None:
    """P11."""
    async with connected(own_nats.url) as connection:
        await own_nats.kill()
        await eventually(lambda: not connection.is_up)
        call = asyncio.create_task(connection.request(f"{prefix}.x", b"", timeout_s=30))
        await asyncio.sleep(0)
        await asyncio.wait_for(connection.close(), 20)
        with pytest.raises(BusClosedError):
            await asyncio.wait_for(call, 10)


USERS = """
authorization {
  users: [
    {user: all, password: a}
    {user: trainer, password: t, permissions: {publish: ["env.>"], subscribe: ["_INBOX_trainer.>"]}}
  ]
}
"""


async def test_wrong_credentials_are_told_at_once() -> None:
    """P58: not retried until the connect timeout; the password is not shown."""
    async with EmbeddedNats(config=USERS) as nats:
        connection = Connection(resolve_bus_options(nats.url.replace("//", "//all:wrong-one@")), name="test")
        async with asyncio.timeout(15):
            with pytest.raises(BusAuthError, match="refused the credentials") as caught:
                await connection.open(timeout_s=30)
        assert "wrong-one" not in str(caught.value)
        await connection.close()


async def test_a_user_that_may_not_hear_its_inbox_is_told_when_it_connects() -> None:
    """P53: within a second, with the denied subject and the option."""
    async with EmbeddedNats(config=USERS) as nats:
        connection = Connection(resolve_bus_options(nats.url.replace("//", "//trainer:t@")), name="test")
        async with asyncio.timeout(15):
            with pytest.raises(BusPermissionError, match=r"'_INBOX\..*inbox_prefix"):
                await connection.open(timeout_s=20)
        await connection.close()


async def test_least_privilege_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """P53: with the prefix set; that NATS denies the message to oneself does not make the connection suspect."""
    monkeypatch.setattr(connection_module, "LOOPBACK_INTERVAL_S", 0.05)
    monkeypatch.setattr(connection_module, "LOOPBACK_TIMEOUT_S", 0.2)
    async with EmbeddedNats(config=USERS) as nats:
        url = nats.url.replace("//", "//trainer:t@")
        async with (
            connected(nats.url.replace("//", "//all:a@")) as answers,
            connected(url, inbox_prefix="_INBOX_trainer") as trainer,
        ):
            await echo(answers, "env.MATH.rollout")
            await answers.request("env.MATH.rollout", b"", timeout_s=20)
            for _ in range(10):
                assert await trainer.request("env.MATH.rollout", b"1", timeout_s=20) == b"1"
                await asyncio.sleep(0.05)
            assert trainer.stats.reconnects == 0


async def test_a_denied_subject_is_named() -> None:
    """P53: in its own error, whatever the case of its letters."""
    async with EmbeddedNats(config=USERS) as nats:
        url = nats.url.replace("//", "//trainer:t@")
        async with connected(url, inbox_prefix="_INBOX_trainer") as trainer:
            with pytest.raises(BusPermissionError, match="denied this user to publish"):
                await trainer.request("other.MATH.rollout", b"", timeout_s=0.3)


async def test_a_process_shares_one_connection_per_address(nats_url: str) -> None:
    options = resolve_bus_options(nats_url)
    one, two = Bus.acquire(options), Bus.acquire(options)
    assert one is two
    await asyncio.wrap_future(one.open(timeout_s=20))
    await asyncio.to_thread(one.release)
    assert two.connection.is_up
    await asyncio.to_thread(two.release)
    assert not two.connection.is_up
    three = Bus.acquire(options)
    assert three is not one
    await asyncio.to_thread(three.release)


async def test_nats_away_while_a_new_client_is_made_costs_one_connection(own_nats: EmbeddedNats, prefix: str) -> None:
    """P10: each failed try closes a client of nats-py, which must not start further tries."""
    async with connected(own_nats.url) as connection:
        await echo(connection, f"{prefix}.echo")
        await own_nats.kill()
        assert connection._client is not None
        errors = connection.stats.errors
        await connection._client.close()
        await eventually(lambda: connection.stats.errors >= errors + 4)
        tasks = len(connection._tasks)
        await eventually(lambda: connection.stats.errors >= errors + 6)
        assert len(connection._tasks) == tasks
        await own_nats.restart()
        await eventually(lambda: connection.is_up)
        assert await connection.request(f"{prefix}.echo", b"again", timeout_s=20) == b"again"
        assert connection.stats.rebuilds == 1


async def test_no_socket_stays_open_when_the_close_is_cut_short(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py may wait for ever as it closes, and connect again while it does."""

    async def never(client: Client) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Client, "close", never)
    monkeypatch.setattr(dialer, "CLOSE_TIMEOUT_S", 0.1)
    connection = Connection(resolve_bus_options(nats_url), name="test")
    await connection.open(timeout_s=20)
    client = connection._client
    assert client is not None
    await connection.close()
    writers = list(client._writers)
    assert writers
    assert all(writer.is_closing() for writer in writers)
    with pytest.raises(nats.errors.ConnectionClosedError):
        await client._connect_to_server(client._server_pool[0])
    await client._close(Client.CLOSED, do_cbs=False)  # its tasks
