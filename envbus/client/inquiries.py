"""What a client asks about an env: what it is, who serves it, its eval set. Runs on the bus loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar, cast

from envbus.bus.codec import decode_map
from envbus.bus.connection import Connection
from envbus.bus.failures import from_failure
from envbus.bus.messages import (
    Beat,
    ExamplesPage,
    ExamplesRequest,
    Failure,
    Info,
    InfoRequest,
    WireMessage,
    pack,
    parse,
)
from envbus.bus.subjects import Subjects
from envbus.client.absence import no_server_text
from envbus.client.crashes import Crashes
from envbus.client.presence import hear_beats, hear_beats_if_allowed
from envbus.errors import (
    BusAuthError,
    CallTimeoutError,
    DecodeError,
    EnvbusError,
    EnvironmentCrashedError,
    NoServerError,
    ServerLoadingError,
)
from envbus.settings import PROBE_TIMEOUT_S, ClientSettings
from envbus.types import RolloutInput

POLL_S = 0.25
PAGE = 500
"""Examples asked for at once."""
PAGE_TIMEOUT_S = 10.0
PAGE_TRIES = 3
"""A server that hangs gets its share of the requests: another one may answer the next."""
A = TypeVar("A", bound=WireMessage)


class Inquiries:
    """Questions about one env."""

    def __init__(self, connection: Connection, subjects: Subjects, settings: ClientSettings) -> None:
        self._connection = connection
        self._subjects = subjects
        self._settings = settings

    async def info(self) -> Info:
        """Return what one server says the env is."""
        return await self._ask(self._subjects.info, InfoRequest(), Info, timeout_s=PROBE_TIMEOUT_S)

    async def servers(self) -> list[Beat]:
        """Return the latest heartbeat of each server of the env."""
        beats = await hear_beats(self._connection, self._subjects.prefix)
        return [beat for beat in beats if beat.env == self._subjects.env]

    async def wait_for_server(self, timeout_s: float | None) -> Info:
        """Wait until a server of the env takes jobs; see NATSEnvClient.wait_for_server."""
        started = time.monotonic()
        appear_s = timeout_s if timeout_s is not None else self._settings.no_server_timeout_s
        load_s = timeout_s if timeout_s is not None else self._settings.loading_timeout_s
        async with Crashes(self._connection, self._subjects) as crashes:
            while True:
                waited_s = time.monotonic() - started
                try:
                    info = await self.info()
                except BusAuthError:
                    if waited_s >= appear_s:
                        raise
                except (NoServerError, CallTimeoutError) as error:
                    if (crash := await crashes.certain()) is not None:
                        raise crash from error
                    if waited_s >= appear_s and (reason := await self._nobody(crashes)) is not None:
                        raise reason from error
                    if waited_s >= load_s:
                        raise ServerLoadingError(
                            f"a server of env {self._subjects.env!r} is there but did not answer in {waited_s:.0f} s"
                        ) from error
                else:
                    if info.state == "ready":
                        return info
                    if waited_s >= load_s:
                        raise ServerLoadingError(
                            f"the servers of env {self._subjects.env!r} are still {info.state} after {waited_s:.0f} s"
                        )
                await asyncio.sleep(POLL_S)

    async def examples(self, num_examples: int) -> list[RolloutInput]:
        """Return the first examples of the eval set (-1: all), read page by page."""
        rows: list[RolloutInput] = []
        while num_examples < 0 or len(rows) < num_examples:
            count = PAGE if num_examples < 0 else min(PAGE, num_examples - len(rows))
            request = ExamplesRequest(start=len(rows), count=count)
            page = await self._page(request)
            rows += _rows(page, asked=request)
            if len(rows) >= page.total:
                break
        return rows

    async def _page(self, request: ExamplesRequest) -> ExamplesPage:
        """Any server may be asked, one that hangs or still loads as well as one that is ready."""
        give_up_at = time.monotonic() + self._settings.loading_timeout_s
        unanswered = 0
        while True:
            try:
                return await self._ask(self._subjects.examples, request, ExamplesPage, timeout_s=PAGE_TIMEOUT_S)
            except CallTimeoutError:
                unanswered += 1
                if unanswered == PAGE_TRIES:
                    raise
            except ServerLoadingError:
                if time.monotonic() >= give_up_at:
                    raise
                await asyncio.sleep(POLL_S)

    async def _ask(self, subject: str, request: WireMessage, expected: type[A], *, timeout_s: float) -> A:
        try:
            data = await self._connection.request(subject, pack(request), timeout_s=timeout_s)
        except TimeoutError as error:
            if (trouble := self._connection.trouble) is not None:
                raise BusAuthError(str(trouble)) from error
            raise CallTimeoutError(f"no answer on {subject} within {timeout_s:g} s", retryable=True) from error
        answer = parse(data)
        if isinstance(answer, Failure):
            raise from_failure(answer)
        if not isinstance(answer, expected):
            raise DecodeError(f"expected {expected.kind} on {subject}, got {answer.kind}")
        return answer

    async def _nobody(self, crashes: Crashes) -> EnvbusError | None:
        """Return why no server takes jobs; None if one came up meanwhile."""
        env = self._subjects.env
        beats = await hear_beats_if_allowed(self._connection, self._subjects.prefix)
        here = [beat for beat in beats or () if beat.env == env]
        if any(beat.state in ("loading", "ready", "full") for beat in here):
            return None
        failed = [beat for beat in here if beat.state == "failed"]
        if failed:
            return EnvironmentCrashedError(f"env {env!r} could not be loaded by its server: {failed[0].error}")
        where = self._connection.options.describe()
        present = None if beats is None else sorted({beat.env for beat in beats})
        return NoServerError(no_server_text(env, where, present, crashes.troubles()))


def _rows(page: ExamplesPage, *, asked: ExamplesRequest) -> list[RolloutInput]:
    rows: Any = decode_map(page.body).get("examples")
    if not isinstance(rows, list) or (not rows and asked.start < page.total):
        raise DecodeError(f"the page of examples at {asked.start} of {page.total} holds none")
    if len(rows) > asked.count or not all(isinstance(row, dict) for row in rows):
        raise DecodeError(f"the page of examples at {asked.start} is not {asked.count} maps at most")
    return cast(list[RolloutInput], rows)
