"""Answers what an env is, and pages of its eval set. Runs on the bus thread; the data is read elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbus.bus.codec import encode
from envbus.bus.connection import Connection
from envbus.bus.failures import to_failure
from envbus.bus.messages import ExamplesPage, ExamplesRequest, Info, InfoRequest, WireMessage, pack, parse_as
from envbus.bus.subjects import WORK_QUEUE, Subjects
from envbus.bus.tasks import TaskSet
from envbus.error_chain import ErrorChain
from envbus.errors import BadRequestError, EnvbusError, PayloadTooLargeError, RemoteError, ServerLoadingError
from envbus.server.allowance import Allowance
from envbus.server.identity import Identity
from envbus.server.outcomes import ENVELOPE_BYTES
from envbus.server.reception import Reception
from envbus.settings import ServerSettings
from envbus.types import HostableEnvironment

log = logging.getLogger("envbus.server")


MAX_ANSWERING = 64
"""Requests being answered at once; further ones are refused, and may be made again."""


@dataclass(slots=True)
class EndpointUse:
    """How often an endpoint was asked, and how that went."""

    requests: int = 0
    errors: int = 0
    time_s: float = 0.0
    last_error: str = ""


class Catalogue:
    """What one server tells about its env."""

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        reception: Reception,
        *,
        identity: Identity,
        settings: ServerSettings,
    ) -> None:
        self._connection = connection
        self._subjects = subjects
        self._reception = reception
        self._identity = identity
        self._settings = settings
        self._environment: HostableEnvironment | None = None
        self._examples: Sequence[Mapping[str, Any]] | None = None
        self._requires_groups: bool | None = None
        self._tasks = TaskSet("the catalogue")
        self._allowance = Allowance()
        self.uses = {subjects.info: EndpointUse(), subjects.examples: EndpointUse()}
        """By subject."""
        self._no_examples = ""
        """Why there is no eval set."""

    async def open(self) -> None:
        """Answer requests."""
        self._subscriptions = [
            await self._connection.subscribe(subject, self._on_request, queue=WORK_QUEUE)
            for subject in (self._subjects.info, self._subjects.examples)
        ]

    async def describe(self, environment: HostableEnvironment) -> None:
        """Look at the loaded environment; on the env's loop, before it takes jobs."""
        self._requires_groups = bool(environment.requires_group_rollouts)
        try:
            self._examples = await asyncio.to_thread(environment.eval_examples)
        except Exception as error:
            # A trainer brings its own inputs: an env without an eval set is still of use.
            log.exception("the eval set of env %s could not be read", self._identity.env)
            self._no_examples = repr(ErrorChain(error))
        self._environment = environment

    async def close(self) -> None:
        """Answer no more."""
        for subscription in self._subscriptions:
            await self._connection.leave(subscription)
        await self._tasks.close()

    def _on_request(self, message: Any) -> None:
        if not self._connection.is_inbox(message.reply) or not self._allowance.take(time.monotonic()):
            return
        if len(self._tasks) < MAX_ANSWERING:
            self._tasks.spawn(self._reply(message))
        else:
            use = self.uses[message.subject]
            use.requests, use.errors, use.last_error = use.requests + 1, use.errors + 1, RemoteError.__name__
            error = RemoteError(f"{MAX_ANSWERING} requests are being answered; try again", retryable=True)
            self._connection.send(message.reply, pack(to_failure(error, origin=self._identity.server_id)))

    async def _reply(self, message: Any) -> None:
        use, started = self.uses[message.subject], time.monotonic()
        use.requests += 1
        try:
            answer = await self._answer(message)
        except Exception as error:  # noqa: BLE001 - answered, and logged
            use.errors += 1
            use.last_error = type(error).__name__
            if not isinstance(error, EnvbusError):
                text = f"a request on {message.subject} failed"
                self._reception.notices.note("request", text, time.monotonic(), error=error)
            answer = to_failure(error, origin=self._identity.server_id)
        use.time_s += time.monotonic() - started
        await self._connection.publish(message.reply, pack(answer))

    async def _answer(self, message: Any) -> WireMessage:
        if message.subject == self._subjects.info:
            parse_as(message.data or pack(InfoRequest()), InfoRequest)
            return self._info()
        request = parse_as(message.data, ExamplesRequest)
        return await asyncio.to_thread(self._page, request)

    def _info(self) -> Info:
        identity, settings = self._identity, self._settings
        return Info(
            server=identity.server_id,
            state=self._reception.state,
            env=identity.env,
            env_id=identity.env_id,
            env_args=identity.env_args,
            fingerprint=identity.fingerprint,
            versions=identity.versions,
            requires_group_rollouts=self._requires_groups,
            num_eval_examples=len(self._examples) if self._examples is not None else None,
            max_concurrent=self._reception.slots.capacity,
            max_input_bytes=settings.max_input_bytes,
            max_result_bytes=settings.max_result_bytes,
        )

    def _page(self, request: ExamplesRequest) -> ExamplesPage:
        """In a thread: reading rows may touch the disk."""
        if self._environment is None:
            raise ServerLoadingError("the environment is still loading", origin=self._identity.server_id)
        if self._examples is None:
            raise BadRequestError(
                f"the eval set of this env could not be read: {self._no_examples}; mend that, or pass your own inputs",
                origin=self._identity.server_id,
            )
        limit = self._connection.max_payload - ENVELOPE_BYTES
        rows: list[Any] = []
        size = 0
        for index in range(request.start, min(request.start + request.count, len(self._examples))):
            row_bytes = len(encode(self._examples[index])) + 16
            if size + row_bytes > limit:
                break
            rows.append(self._examples[index])
            size += row_bytes
        if not rows and request.start < len(self._examples):
            raise PayloadTooLargeError(size_bytes=row_bytes, limit_bytes=limit, what=f"example {request.start}")
        return ExamplesPage(total=len(self._examples), start=request.start, body=encode({"examples": rows}))
