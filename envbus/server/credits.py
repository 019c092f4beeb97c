"""A server's place in the queue group: one limited subscription per batch of credits.

A new subscription for each batch, rather than a raised limit: nats-server may
have used up the old one while its last message is still under way, and a raise
that comes then is lost.
"""

from __future__ import annotations

import asyncio

from envbus.bus.connection import Connection, Subscription
from envbus.bus.inbox import Handler
from envbus.bus.subjects import WORK_QUEUE


class Credits:
    """The limited subscriptions that let pushed jobs in. On the bus loop.

    Args:
        subject: The env's work subject.
        handler: Gets each pushed job; must not wait.
    """

    def __init__(self, connection: Connection, subject: str, handler: Handler) -> None:
        self._connection = connection
        self._subject = subject
        self._handler = handler
        self._live: dict[Subscription, int] = {}
        self._one_at_a_time = asyncio.Lock()

    async def add(self, count: int) -> None:
        """Let ``count`` more jobs in."""
        async with self._one_at_a_time:
            self._live = {sub: limit for sub, limit in self._live.items() if sub.received < limit}
            subscription = await self._connection.subscribe_limited(
                self._subject, self._handler, queue=WORK_QUEUE, limit=count
            )
            self._live[subscription] = count

    async def withdraw(self) -> None:
        """Leave the queue group; when this returns, what was under way has been handled."""
        async with self._one_at_a_time:
            leaving, self._live = self._live, {}
            await asyncio.gather(*(self._connection.leave(subscription) for subscription in leaving))
