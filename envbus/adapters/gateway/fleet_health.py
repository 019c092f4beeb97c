"""Whether an env's fleet takes rollouts, asked once a second, so that a health check is answered at once."""

from __future__ import annotations

import asyncio
import logging

from envbus.client import NATSEnvClient
from envbus.errors import CallTimeoutError, EnvbusError

log = logging.getLogger("envbus.gateway")

INTERVAL_S = 1.0
UNANSWERED = 3
"""So many questions in a row without an answer are trouble: one may have met a server that just died."""


class FleetHealth:
    """What is known.

    Attributes:
        trouble: Why no rollouts are taken; None while they are.
    """

    def __init__(self, client: NATSEnvClient) -> None:
        self._client = client
        self._unanswered = 0
        self.trouble: str | None = "the gateway has just started"

    async def watch(self) -> None:
        """Ask for ever; what changes is logged."""
        had_trouble = False
        while True:
            await self.ask()
            if self.trouble is not None and not had_trouble:
                log.warning("requests for env %s wait: %s", self._client.env, self.trouble)
            elif self.trouble is None and had_trouble:
                log.warning("env %s takes rollouts", self._client.env)
            had_trouble = self.trouble is not None
            await asyncio.sleep(INTERVAL_S)

    async def ask(self) -> None:
        """Ask once."""
        try:
            info = await self._client.info()
        except CallTimeoutError as error:
            self._unanswered += 1
            if self._unanswered >= UNANSWERED:
                self.trouble = str(error)
        except EnvbusError as error:
            self._unanswered = 0
            self.trouble = str(error) or type(error).__name__
        else:
            self._unanswered = 0
            self.trouble = None if info.state == "ready" else f"env {self._client.env!r} is {info.state}"
