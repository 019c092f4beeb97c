"""The connection to NATS; the only module that imports nats. Everything here runs on the bus thread's loop.

It reconnects for ever with jitter, builds a new client when nats-py closes for
good (any -ERR), checks sizes before every publish, routes all replies through
one inbox, and notices a connection that reads as up but hears nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import nats
import nats.errors
from nats.aio.client import Client, Server
from nats.aio.subscription import Subscription as NatsSubscription

from envbus.bus.address import BusOptions
from envbus.bus.diagnose import explain_unreachable
from envbus.errors import (
    BusAuthError,
    BusClosedError,
    BusError,
    BusPermissionError,
    BusUnreachableError,
    NoServerError,
    PayloadTooLargeError,
)

log = logging.getLogger("envbus.bus")

PING_INTERVAL_S = 5
MAX_PINGS_OUT = 2
RECONNECT_MAX_S = 4.0
CLOSE_TIMEOUT_S = 2
LOOPBACK_INTERVAL_S = 10.0
LOOPBACK_TIMEOUT_S = 10.0
INBOX_TIMEOUT_S = 2.0
_ATTEMPT_TIMEOUT_S = 5.0


class Message(Protocol):
    """A message from NATS."""

    subject: str
    reply: str
    data: bytes


Handler = Callable[[Any], None]
"""Gets a Message; must only enqueue or decide, never wait."""


def is_no_responders(message: Any) -> bool:
    """Whether NATS says that nobody was there to get the request (503)."""
    return bool(message.headers) and message.headers.get("Status") == "503" and not message.data


@dataclass(slots=True, eq=False)
class Subscription:
    """A subscription that outlives the client object beneath it.

    Attributes:
        limited: A queue subscription with a message limit. Its owner opens another after an
            outage, as nats-server counts from 0 again.
    """

    subject: str
    handler: Handler
    queue: str
    limited: bool = False
    current: NatsSubscription | None = None

    @property
    def received(self) -> int:
        """Messages that arrived so far."""
        return self.current.delivered if self.current is not None else 0


@dataclass(slots=True)
class ConnectionStats:
    """Counts of what went wrong on a connection."""

    reconnects: int = 0
    rebuilds: int = 0
    slow_consumers: int = 0
    errors: int = 0
    outage_s: float = 0.0


@dataclass(slots=True, eq=False)
class Listener:
    """What an owner of a connection wants to hear; called on the bus loop."""

    on_disconnected: Callable[[], None] = lambda: None
    on_reconnected: Callable[[float], None] = lambda outage_s: None
    """Gets the length of the outage in seconds."""


class Connection:
    """One connection to NATS.

    Args:
        options: Where and as whom.
        name: Shown in the monitoring of nats-server.
    """

    def __init__(self, options: BusOptions, *, name: str) -> None:
        self.options = options
        self.name = name
        self.stats = ConnectionStats()
        self.inbox = f"{options.inbox_prefix}.{secrets.token_hex(11)}"
        self._client: Client | None = None
        self._subscriptions: set[Subscription] = set()
        self._listeners: list[Listener] = []
        self._routes: dict[str, Handler] = {}
        self._route_count = 0
        self._up = asyncio.Event()
        self._down_since: float | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_error: Exception | None = None
        self._denied: dict[str, str] = {}
        self._heard = asyncio.Event()
        self._refused = asyncio.Event()
        self._attempts = 0
        self._outbox: deque[tuple[str, bytes, str]] = deque()
        self._outbox_filled = asyncio.Event()
        self._outbox_sent = asyncio.Event()

    # ---- life

    async def open(self, *, timeout_s: float | None) -> None:
        """Connect.

        Args:
            timeout_s: Give up after this long; None: keep trying for ever, saying so in the log.

        Raises:
            BusUnreachableError: Nobody answered in time, or what answers is not NATS.
            BusAuthError: The credentials were refused.
            BusPermissionError: This user may not hear replies on its inbox.
        """
        loop = asyncio.get_running_loop()
        give_up_at = None if timeout_s is None else loop.time() + timeout_s
        tries = 0
        while True:
            tries += 1
            try:
                await self._connect_once(
                    _ATTEMPT_TIMEOUT_S if timeout_s is None else min(timeout_s, _ATTEMPT_TIMEOUT_S)
                )
                break
            except BusUnreachableError as error:
                pause_s = _backoff_s(tries)
                if give_up_at is not None and loop.time() + pause_s >= give_up_at:
                    raise BusUnreachableError(await explain_unreachable(self.options, str(error))) from error
                log.warning("NATS at %s: %s; trying again", self.options.describe(), error)
                await asyncio.sleep(pause_s)
        await self._check_inbox()
        self._spawn(self._watch_loopback())
        self._spawn(self._send_outbox())

    async def _check_inbox(self) -> None:
        await self._hears_itself(INBOX_TIMEOUT_S)
        denied = self.denied(f"{self.inbox}.*")
        if denied is not None and self._client is not None:
            self._up.clear()
            client, self._client = self._client, None
            await client.close()
            raise BusPermissionError(denied)

    async def close(self) -> None:
        """Send what is buffered, then close. Pending requests end with BusClosedError."""
        if self._closed:
            return
        if self._outbox and self.is_up:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._outbox_sent.wait(), CLOSE_TIMEOUT_S)
        self._closed = True
        self._up.set()  # wakes those that wait for the connection to be up; it never will be
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail_routes()
        if self._client is not None and not self._client.is_closed:
            with contextlib.suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
                if self._client.is_connected:
                    await self._client.flush(timeout=CLOSE_TIMEOUT_S)
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.close()

    @property
    def is_up(self) -> bool:
        """Whether messages can be sent now."""
        return self._up.is_set() and self._client is not None and self._client.is_connected and not self._closed

    async def wait_up(self) -> None:
        """Wait until messages can be sent."""
        while not self.is_up:
            if self._closed:
                raise BusClosedError("the connection is closed")
            await self._up.wait()
            if not self.is_up and not self._closed:
                await asyncio.sleep(0.01)

    @property
    def max_payload(self) -> int:
        """Bytes that one message may have, headers counted; read from the live connection."""
        return self._client.max_payload if self._client is not None else 1024 * 1024

    def listen(self, listener: Listener) -> None:
        """Tell this listener of outages."""
        self._listeners.append(listener)

    def unlisten(self, listener: Listener) -> None:
        """Tell it no more."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    # ---- messages

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> bool:
        """Send a message.

        Returns:
            False if the connection is down and nothing was sent.

        Raises:
            PayloadTooLargeError: Over the connection's limit.
            BusClosedError: After close().
        """
        if self._closed:
            raise BusClosedError("the connection is closed")
        if len(data) > self.max_payload:
            raise PayloadTooLargeError(size_bytes=len(data), limit_bytes=self.max_payload)
        client = self._client
        if client is None or not client.is_connected:
            return False
        try:
            await client.publish(subject, data, reply=reply)
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError):
            return False
        except nats.errors.Error as error:
            raise BusError(f"cannot publish to {subject}: {error}") from error
        return True

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Publish soon, in order, from code that cannot wait; dropped if the connection is down by then."""
        self._outbox.append((subject, data, reply))
        self._outbox_sent.clear()
        self._outbox_filled.set()

    async def _send_outbox(self) -> None:
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox:
                subject, data, reply = self._outbox.popleft()
                try:
                    await self.publish(subject, data, reply=reply)
                except BusError as error:
                    log.error("a message to %s was not sent: %s", subject, error)
            self._outbox_sent.set()

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its one reply.

        Raises:
            NoServerError: Nobody subscribes to the subject (503).
            TimeoutError: No reply in time, or the connection was down for all of it.
            PayloadTooLargeError: Over the connection's limit.
            BusPermissionError: The subject is denied to this user.
            BusClosedError: After close(), or closed meanwhile.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        token = self.route(lambda message: _settle(answer, message, subject))
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.publish(subject, data, reply=self.reply_subject(token)):
                    await self.wait_up()
                return await answer
        except TimeoutError as error:
            if denied := self.denied(subject):
                raise BusPermissionError(denied) from error
            raise
        finally:
            self.unroute(token)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, even if publishing failed first

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Subscribe; restored after every outage until unsubscribe()."""
        subscription = Subscription(subject, handler, queue)
        self._subscriptions.add(subscription)
        if self.is_up:
            await self._restore(subscription)
        return subscription

    async def subscribe_limited(self, subject: str, handler: Handler, *, queue: str, limit: int) -> Subscription:
        """Join a queue group for ``limit`` messages: nats-server itself stops delivery there."""
        subscription = Subscription(subject, handler, queue, limited=True)
        await self._restore(subscription)
        if subscription.current is not None:
            await subscription.current.unsubscribe(limit=limit)
        return subscription

    async def leave(self, subscription: Subscription) -> None:
        """End a subscription after the messages that are already under way were handled."""
        self._subscriptions.discard(subscription)
        current, subscription.current = subscription.current, None
        if current is not None and self.is_up:
            with contextlib.suppress(nats.errors.Error, asyncio.TimeoutError):
                await current.drain()  # type: ignore[no-untyped-call]

    # ---- the inbox

    def route(self, handler: Handler, *, token: str | None = None) -> str:
        """Give replies to a new token of the inbox to a handler; returns the token."""
        if token is None:
            self._route_count += 1
            token = f"{self._route_count:x}"
        self._routes[token] = handler
        return token

    def unroute(self, token: str) -> None:
        """Drop what arrives for the token from now on."""
        self._routes.pop(token, None)

    def reply_subject(self, token: str) -> str:
        """Return the reply subject of a token."""
        return f"{self.inbox}.{token}"

    def is_inbox(self, subject: str) -> bool:
        """Whether a reply subject is an inbox: servers reply to nothing else."""
        return subject.startswith(("_INBOX.", "_INBOX_", "_R_.", self.options.inbox_prefix + "."))

    def denied(self, subject: str) -> str | None:
        """Return what NATS said when it denied this subject, if it did."""
        return self._denied.get(subject.lower())

    def _on_inbox(self, message: Any) -> None:
        handler = self._routes.get(message.subject.rpartition(".")[2])
        if handler is not None:
            handler(message)

    def _fail_routes(self) -> None:
        closed = _ClosedMessage()
        for handler in list(self._routes.values()):
            handler(closed)
        self._routes.clear()

    # ---- nats-py

    async def _connect_once(self, timeout_s: float) -> None:
        client = Client()
        self._last_error = None
        self._attempts = 0
        try:
            async with asyncio.timeout(timeout_s):
                connecting = client.connect(
                    **self.options.nats_kwargs(),
                    name=self.name,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    connect_timeout=2,
                    ping_interval=PING_INTERVAL_S,
                    max_outstanding_pings=MAX_PINGS_OUT,
                    reconnect_to_server_handler=self._choose_server,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    pending_size=64 * 1024 * 1024,
                )
                await self._unless_refused(connecting)
        except (TimeoutError, nats.errors.Error, OSError, ValueError) as error:
            with contextlib.suppress(Exception):
                await client.close()
            cause = self._last_error or error
            if _is_refusal(cause):
                raise BusAuthError(
                    f"NATS at {self.options.describe()} refused the credentials; check user, password, token or creds"
                ) from error
            raise BusUnreachableError(str(cause) or type(cause).__name__) from error
        self._client = client
        inbox = Subscription(f"{self.inbox}.*", self._on_inbox, "")
        await self._restore(inbox)
        for subscription in list(self._subscriptions):
            await self._restore(subscription)
        self._up.set()

    async def _unless_refused(self, connecting: Coroutine[Any, Any, None]) -> None:
        """Await a first connect, but not its retries after the credentials were refused."""
        self._refused.clear()
        tries = asyncio.ensure_future(connecting)
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            await asyncio.wait({tries, refused}, return_when=asyncio.FIRST_COMPLETED)
            if tries.done():
                await tries
            elif self._last_error is not None:
                raise self._last_error
        finally:
            tries.cancel()
            refused.cancel()
            await asyncio.gather(tries, refused, return_exceptions=True)

    async def _restore(self, subscription: Subscription) -> None:
        if self._client is None:
            raise BusClosedError("the connection is not open")
        handler = subscription.handler

        async def deliver(message: Any) -> None:
            handler(message)

        try:
            subscription.current = await self._client.subscribe(
                subscription.subject,
                queue=subscription.queue,
                cb=deliver,
                pending_msgs_limit=0,
                pending_bytes_limit=0,
            )
        except nats.errors.Error as error:
            raise BusError(f"cannot subscribe to {subscription.subject}: {error}") from error

    def _choose_server(self, servers: list[Server], info: dict[str, Any]) -> tuple[Server, float]:
        self._attempts += 1
        return random.choice(servers), _backoff_s(self._attempts)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        self.stats.errors += 1
        text = str(error)
        if _is_refusal(error):
            self._refused.set()
        if isinstance(error, nats.errors.SlowConsumerError):
            self.stats.slow_consumers += 1
        if "permissions violation" in text.lower():
            self._note_denied(text)
        elif self.is_up or not isinstance(error, OSError):
            log.warning("NATS at %s: %s", self.options.describe(), text or type(error).__name__)

    def _note_denied(self, text: str) -> None:
        # nats-py gives the text in lower case: nats: permissions violation for publish to "x.y"
        subject = text.partition('"')[2].partition('"')[0]
        action = "subscribe" if "subscription" in text.lower() else "publish"
        explanation = f"NATS denied this user to {action} to {subject!r}; give it that permission"
        if subject.startswith(self.inbox.lower().rpartition(".")[0]):
            explanation += ", or set the inbox prefix that it may use (inbox_prefix)"
        self._denied[subject] = explanation
        log.error("%s", explanation)
        if subject.startswith(self.inbox.lower()):
            self._heard.set()

    async def _on_disconnected(self) -> None:
        if self._closed or not self._up.is_set():
            return
        self._up.clear()
        self._down_since = asyncio.get_running_loop().time()
        log.warning("NATS at %s: connection lost, reconnecting", self.options.describe())
        for listener in list(self._listeners):
            listener.on_disconnected()

    async def _on_reconnected(self) -> None:
        self._attempts = 0
        self.stats.reconnects += 1
        self._back_up()

    async def _on_closed(self) -> None:
        if self._closed or self._client is None:
            return
        if self._up.is_set():
            await self._on_disconnected()
        self._spawn(self._rebuild())

    async def _rebuild(self) -> None:
        tries = 0
        while not self._closed:
            tries += 1
            try:
                await self._connect_once(_ATTEMPT_TIMEOUT_S)
            except (BusUnreachableError, BusAuthError) as error:
                log.warning("NATS at %s: %s; trying again", self.options.describe(), error)
                await asyncio.sleep(_backoff_s(tries))
            else:
                self.stats.rebuilds += 1
                self._back_up()
                return

    def _back_up(self) -> None:
        now = asyncio.get_running_loop().time()
        outage_s = now - self._down_since if self._down_since is not None else 0.0
        self._down_since = None
        self.stats.outage_s += outage_s
        self._denied.clear()
        self._up.set()
        log.info("NATS at %s: connected again after %.1f s", self.options.describe(), outage_s)
        for listener in list(self._listeners):
            listener.on_reconnected(outage_s)

    async def _watch_loopback(self) -> None:
        while True:
            await asyncio.sleep(LOOPBACK_INTERVAL_S)
            if not self.is_up:
                continue
            if not await self._hears_itself(LOOPBACK_TIMEOUT_S) and self.is_up and self._client is not None:
                log.warning("NATS at %s: connected but nothing is heard, reconnecting", self.options.describe())
                await self._client.force_reconnect()

    async def _hears_itself(self, timeout_s: float) -> bool:
        """Whether a message to oneself comes back; a denial of it is something heard, too."""
        self._heard.clear()
        token = self.route(lambda message: self._heard.set())
        try:
            async with asyncio.timeout(timeout_s):
                await self.publish(self.reply_subject(token), b"")
                await self._heard.wait()
                return True
        except TimeoutError:
            return False
        finally:
            self.unroute(token)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _ClosedMessage:
    """Given to reply handlers when the connection closes under them."""

    subject = ""
    reply = ""
    data = b""
    headers: dict[str, str] = {"Status": "closed"}  # noqa: RUF012 - a constant


def is_closed_notice(message: Any) -> bool:
    """Whether this stands for "the connection was closed" rather than for a message."""
    return isinstance(message, _ClosedMessage)


def _settle(future: asyncio.Future[bytes], message: Any, subject: str) -> None:
    if future.done():
        return
    if is_closed_notice(message):
        future.set_exception(BusClosedError("the connection was closed while a reply was awaited"))
    elif is_no_responders(message):
        future.set_exception(NoServerError(f"nobody answers on {subject}"))
    else:
        future.set_result(message.data)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower()


def _backoff_s(tries: int) -> float:
    """Return seconds to wait before the next try: doubling from 50 ms, jittered, bounded."""
    return random.uniform(0.5, 1.0) * min(RECONNECT_MAX_S, 0.1 * 2.0 ** min(tries - 1, 10))
