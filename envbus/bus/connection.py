"""The connection to NATS. Everything here runs on the bus thread's loop.

It reconnects for ever with jitter, builds a new client when nats-py closes for
good (any -ERR), checks sizes before every publish, and notices a connection
that reads as up but hears nothing. Only this module and the dialer import nats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import nats
import nats.errors
from nats.aio.subscription import Subscription as NatsSubscription

from envbus.bus.address import BusOptions
from envbus.bus.denials import Action, Denials, told_together
from envbus.bus.diagnose import explain_unreachable
from envbus.bus.dialer import (
    ATTEMPT_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    Dialer,
    SturdyClient,
    backoff_s,
    close_client,
    needs_new_client,
)
from envbus.bus.inbox import INBOX_PREFIXES, Handler, Inbox, settle
from envbus.bus.outbox import Outbox
from envbus.bus.tasks import TaskSet
from envbus.errors import (
    BusAuthError,
    BusClosedError,
    BusError,
    BusPermissionError,
    BusUnreachableError,
    PayloadTooLargeError,
)
from envbus.notices import Notices

log = logging.getLogger("envbus.bus")

LOOPBACK_INTERVAL_S = 10.0
LOOPBACK_TIMEOUT_S = 10.0
INBOX_TIMEOUT_S = 2.0
LEAVE_TIMEOUT_S = 5.0
MAX_UNSENT_BYTES = 128 * 1024 * 1024
"""What may wait to be sent by send(): nobody asks faster than NATS takes answers, but a flood."""
DEFAULT_MAX_PAYLOAD = 1024 * 1024


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
    dropped: int = 0
    """Messages that were not sent as too much waited already."""


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
        self._notices = Notices(log)
        self.inbox = Inbox(options.inbox_prefix)
        self._denials = Denials(self.inbox.subject, log)
        self._dialer = Dialer(
            options,
            name=name,
            on_error=self._on_error,
            on_disconnected=self._on_disconnected,
            on_reconnected=self._on_reconnected,
            on_closed=self._on_closed,
        )
        self._client: SturdyClient | None = None
        self._subscriptions: set[Subscription] = set()
        self._listeners: list[Listener] = []
        self._up = asyncio.Event()
        self._down_since: float | None = None
        self._closed = False
        self._rebuilding = False
        self._tasks = TaskSet("the connection")
        self._listening: dict[str, asyncio.Event] = {}
        """Checks whether this connection hears itself, by their subjects: that one is denied answers it, too."""
        self.trouble: BusAuthError | None = None
        """Why NATS does not take this connection back now, if it said so."""
        self._outbox = Outbox(lambda subject, data, reply: self.publish(subject, data, reply=reply), self._notices)

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
                await self._connect(min(ATTEMPT_TIMEOUT_S, timeout_s or ATTEMPT_TIMEOUT_S))
                break
            except BusUnreachableError as error:
                pause_s = backoff_s(tries)
                if give_up_at is not None and loop.time() + pause_s >= give_up_at:
                    raise BusUnreachableError(await explain_unreachable(self.options, str(error))) from error
                self._note("unreachable", f"{error}; trying again", tries=tries)
                await asyncio.sleep(pause_s)
        await self._check_inbox()
        self._tasks.spawn(self._watch_loopback())
        self._tasks.spawn(self._outbox.run())

    async def _check_inbox(self) -> None:
        pattern = self.inbox.pattern
        if self.denied("subscribe", pattern) is None:
            await self._hears_itself(INBOX_TIMEOUT_S)
        denied = self.denied("subscribe", pattern)
        if denied is not None and self._client is not None:
            self._up.clear()
            client, self._client = self._client, None
            await close_client(client)
            raise BusPermissionError(denied)

    async def close(self) -> None:
        """Send what is buffered, then close. Pending requests end with BusClosedError."""
        if self._closed:
            return
        if self.is_up:
            await self._outbox.emptied(timeout_s=CLOSE_TIMEOUT_S)
        self._closed = True
        self._up.set()  # wakes those that wait for the connection to be up; it never will be
        await self._tasks.close()
        self.inbox.close()
        if self._client is not None and not self._client.is_closed:
            with contextlib.suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
                if self._client.is_connected:
                    await self._client.flush(timeout=CLOSE_TIMEOUT_S)
            await close_client(self._client)
        self._denials.close()
        self._notices.close(time.monotonic())

    def _note(self, kind: str, text: str, level: int = logging.WARNING, **facts: Any) -> None:
        text = f"NATS at {self.options.describe()}: {text}"
        self._notices.note(kind, text, time.monotonic(), level=level, fields=facts)

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
        return self._client.max_payload if self._client is not None else DEFAULT_MAX_PAYLOAD

    @property
    def node(self) -> str | None:
        """Id of the NATS server at the other end, or of the last one."""
        return self._client._server_info.get("server_id") if self._client is not None else None

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
        """Publish soon, in order, from code that cannot wait; dropped if the connection is down, or too slow."""
        if self.unsent_bytes + len(data) <= MAX_UNSENT_BYTES:
            self._outbox.put(subject, data, reply)
            return
        self.stats.dropped += 1
        text = f"takes messages too slowly: {self.unsent_bytes:,} bytes wait, further ones are dropped"
        self._note("too slow", text, logging.ERROR, unsent=self.stats.dropped)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of messages that wait to be sent."""
        return self._outbox.queued_bytes + (self._client.pending_data_size if self._client is not None else 0)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send a request and return its one reply.

        Raises:
            NoServerError: Nobody subscribes to the subject (503).
            TimeoutError: No reply in time, or the connection was down for all of it: ``trouble`` may tell why.
            PayloadTooLargeError: Over the connection's limit.
            BusPermissionError: The subject is denied to this user; told as soon as NATS says so.
            BusClosedError: After close(), or closed meanwhile.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        token = self.inbox.route(lambda message: settle(answer, message, subject))
        try:
            with self._denials.ending(answer, subject):
                async with asyncio.timeout(timeout_s):
                    while not await self.publish(subject, data, reply=self.inbox.reply_subject(token)):
                        await self.wait_up()
                    return await answer
        finally:
            self.inbox.unroute(token)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, even if publishing failed first

    async def subscribe(
        self, subject: str, handler: Handler, *, queue: str = "", optional: str | None = None
    ) -> Subscription:
        """Subscribe; restored after every outage until leave().

        Args:
            optional: What is missed without it; that it is denied is then one warning in the log, and no error.
        """
        if optional is not None:
            self._denials.optional("subscribe", subject, optional)
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
        if current is None:
            return
        try:
            with contextlib.suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
                # nats-py waits for ever for messages whose delivery ended with the connection.
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await (current.drain() if self.is_up else current.unsubscribe())  # type: ignore[no-untyped-call]
        finally:  # else nats-py would subscribe again after an outage
            current._stop_processing()
            current._conn._remove_sub(current._id)
            while not current._pending_queue.empty():
                subscription.handler(current._pending_queue.get_nowait())

    def is_inbox(self, subject: str) -> bool:
        """Whether a reply subject is an inbox: servers reply to nothing else."""
        return subject.startswith((*INBOX_PREFIXES, self.options.inbox_prefix + "."))

    @property
    def may_not_send(self) -> bool:
        """Whether NATS denied this user to publish to anything but an inbox."""
        return self._denials.has_published

    def denied(self, action: Action, subject: str) -> str | None:
        """Return what NATS said when it denied this subject, if it did; to publish: within the last seconds."""
        return self._denials.of(action, subject)

    async def check_allowed(self, *subscribed: str, published: Iterable[str] = ()) -> None:
        """Wait until NATS has judged what was subscribed to and published so far.

        Raises:
            BusPermissionError: It denied some of these subjects to this user; names them all.
        """
        await self._hears_itself(INBOX_TIMEOUT_S)
        denials = [self.denied("subscribe", subject) for subject in subscribed]
        denials += [self.denied("publish", subject) for subject in published]
        if texts := [text for text in denials if text is not None]:
            raise BusPermissionError(told_together(texts))

    async def round_trip(self, *, timeout_s: float) -> float:
        """Return the seconds that a message to oneself takes; what was sent before has then been judged by NATS.

        A user who may not send to its own inbox hears of that instead, in the same order.

        Raises:
            TimeoutError: Neither came.
        """
        started = time.monotonic()
        if not await self._hears_itself(timeout_s):
            raise TimeoutError
        return time.monotonic() - started

    # ---- nats-py

    async def _connect(self, timeout_s: float) -> None:
        client = await self._dialer.dial(timeout_s)
        if self._closed:
            await close_client(client)
            raise BusClosedError("the connection was closed while it was opened")
        self._client = client
        try:
            await self._restore(Subscription(self.inbox.pattern, self.inbox.deliver, ""))
            restored: set[Subscription] = set()
            while missing := self._subscriptions - restored:  # more may come meanwhile
                for subscription in missing & self._subscriptions:
                    await self._restore(subscription)
                restored |= missing
        except BusError as error:
            await close_client(client)
            raise BusUnreachableError(f"lost again at once: {error}") from error
        self._up.set()

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

    def _on_error(self, error: Exception) -> None:
        self.stats.errors += 1
        if isinstance(error, nats.errors.SlowConsumerError):
            self.stats.slow_consumers += 1
        denial = self._denials.note(str(error))
        if denial is not None:
            for subject in self._listening if denial.subject == self.inbox.pattern else [denial.subject]:
                if (heard := self._listening.get(subject)) is not None:
                    heard.set()
        elif self._down_since is not None and needs_new_client(error):
            self._give_up_client()
        elif self.is_up or not isinstance(error, OSError):
            self._note(type(error).__name__, str(error) or type(error).__name__, errors=self.stats.errors)

    async def _on_disconnected(self) -> None:
        if self._closed or not self._up.is_set():
            return
        self._up.clear()
        self._down_since = asyncio.get_running_loop().time()
        self._denials.clear()  # what this user may do may be something else by then
        self._note("lost", "connection lost, reconnecting")
        for listener in list(self._listeners):
            listener.on_disconnected()

    async def _on_reconnected(self) -> None:
        self.stats.reconnects += 1
        self._back_up()

    async def _on_closed(self) -> None:
        if self._closed or self._client is None:
            return
        if self._up.is_set():
            await self._on_disconnected()
        self._give_up_client()

    def _give_up_client(self) -> None:
        """Make another one in its place: nats-py has closed it, or connects with credentials that are out of date."""
        # Before the first open() has come to its end, it is open() that tries again.
        if self._down_since is not None and not self._rebuilding and self._client is not None:
            self._rebuilding = True
            self._tasks.spawn(self._rebuild(self._client))

    async def _rebuild(self, old: SturdyClient) -> None:
        try:
            await close_client(old)
            await self._rebuild_until_up()
        finally:
            self._rebuilding = False

    async def _rebuild_until_up(self) -> None:
        tries = 0
        while not self._closed:
            tries += 1
            try:
                await self._connect(ATTEMPT_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - logged, and tried for ever: TLS files may be just being renewed
                self.trouble = error if isinstance(error, BusAuthError) else None
                self._note("unreachable", f"{str(error) or type(error).__name__}; trying again", tries=tries)
                await asyncio.sleep(backoff_s(tries))
            else:
                self.stats.rebuilds += 1
                self._back_up()
                return

    def _back_up(self) -> None:
        now = asyncio.get_running_loop().time()
        outage_s = now - self._down_since if self._down_since is not None else 0.0
        self._down_since = None
        self.stats.outage_s += outage_s
        self._dialer.connected()
        self.trouble = None
        self._up.set()
        text = f"connected again after {outage_s:.1f} s"
        count = self.stats.reconnects + self.stats.rebuilds
        self._note("back", text, outage_s=round(outage_s, 3), reconnects=count)
        for listener in list(self._listeners):
            listener.on_reconnected(outage_s)

    async def _watch_loopback(self) -> None:
        while True:
            await asyncio.sleep(LOOPBACK_INTERVAL_S)
            self._notices.tick(time.monotonic())
            self._denials.tick()
            try:
                await self._reconnect_if_deaf()
            except Exception as error:  # noqa: BLE001 - logged, and watched on
                text = "the check of the connection failed"
                self._notices.note("loopback", text, time.monotonic(), error=error)

    async def _reconnect_if_deaf(self) -> None:
        if not self.is_up or await self._hears_itself(LOOPBACK_TIMEOUT_S):
            return
        if self.is_up and self._client is not None:
            self._note("deaf", "connected but nothing is heard, reconnecting")
            await self._client.force_reconnect()

    async def _hears_itself(self, timeout_s: float) -> bool:
        """Whether a message to oneself comes back; a denial of it is something heard, too."""
        heard = asyncio.Event()
        token = self.inbox.route(lambda message: heard.set())
        subject = self.inbox.reply_subject(token)
        self._listening[subject] = heard
        try:
            async with asyncio.timeout(timeout_s):
                await self.publish(subject, b"")
                await heard.wait()
                return True
        except TimeoutError:
            return False
        finally:
            self.inbox.unroute(token)
            del self._listening[subject]
