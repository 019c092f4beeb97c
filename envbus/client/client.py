"""NATSEnvClient: an environment on the bus, called as if it were here.

Lives on the caller's event loop; the Session with the jobs lives on the bus
thread, so a caller that blocks its loop for a minute loses nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.bus import Bus
from envbus.bus.calls import MAX_GROUP, Call, call_map
from envbus.bus.codec import Limits, freeze
from envbus.bus.messages import INT64_MAX, Beat, Info
from envbus.bus.subjects import DEFAULT_PREFIX, Subjects, env_name
from envbus.bus.thread import Crossing
from envbus.bus.transfer import Packed, unpack_body
from envbus.client.client_job import ClientJob
from envbus.client.inquiries import Inquiries
from envbus.client.session import Session
from envbus.client.watch import Watch
from envbus.errors import BusClosedError, CallTimeoutError, DecodeError, EnvbusError, UsageError
from envbus.evaluation import EvalCallbacks, generate, repeat_examples
from envbus.settings import ClientSettings
from envbus.types import ClientConfig, GenerateOutputs, OnProgress, RolloutInput, RolloutOutput, SamplingArgs

T = TypeVar("T")
MAX_DEADLINE_S = 10 * 365 * 86_400.0


class NATSEnvClient:
    """Calls an environment that servers on the bus host.

    Clients of one process that use the same address share one connection.

    Args:
        address: NATS address(es); default ENVBUS_URL, NATS_URL, then the NATS CLI's context.
        env_id: The environment, as the servers were given it.
        env_args: The arguments that the servers were given: part of the env's name on the bus.
        name: The env's name on the bus, if the servers were given one.
        prefix: First token of all subjects.
        fingerprint: Run only on servers with this fingerprint (see info()).
        priority: Place in the servers' waiting lines; higher goes first.
        timeout_s: Limit for each call; None: as long as it takes.
        settings: Time limits and sizes.

    Raises:
        UsageError: An argument is not usable.
    """

    def __init__(
        self,
        address: str | Sequence[str] | BusOptions | None = None,
        env_id: str | None = None,
        *,
        env_args: Mapping[str, Any] | None = None,
        name: str | None = None,
        prefix: str = DEFAULT_PREFIX,
        fingerprint: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        if env_id is None and name is None:
            raise UsageError("NATSEnvClient: env_id is missing: NATSEnvClient(address, env_id)")
        if not -INT64_MAX <= priority <= INT64_MAX:
            raise UsageError(f"NATSEnvClient: priority {priority} has more than 64 bits")
        self.env_id = env_id or name or ""
        self.env_args = dict(env_args or {})
        self.env = env_name(self.env_id, self.env_args, name)
        self._options = resolve_bus_options(address)
        self._subjects = Subjects(self.env, prefix)
        self._fingerprint = fingerprint
        self._priority = priority
        self._timeout_s = timeout_s
        self._settings = settings or ClientSettings()
        self._client_id = secrets.token_hex(16)
        self._bus: Bus | None = None
        self._session: Session | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._crossings: dict[asyncio.AbstractEventLoop, Crossing] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect to NATS; every call does it when needed.

        Raises:
            BusUnreachableError: No NATS server answered within ``connect_timeout_s``.
            BusAuthError: It refused the credentials.
        """
        await self._ensure_session()

    async def close(self) -> None:
        """End pending calls with BusClosedError, cancel their jobs on the servers, and disconnect."""
        if self._closed:
            return
        self._closed = True
        if self._bus is None or not self._bus.is_of_this_process:
            return
        try:
            if self._session is not None:
                await self._bus.thread.run(self._session.close())
        finally:
            await asyncio.to_thread(self._bus.release)

    # ---- rollouts

    async def run_rollout(
        self,
        input: RolloutInput,
        client: ClientConfig | None,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> RolloutOutput:
        """Run and score one rollout on any server of the env.

        Args:
            input: ``prompt`` and ``example_id``, and what else the env needs of its row.
            client: Where the model is; the server calls it. None for envs that call no model.
            model: Its name.
            sampling_args: As for a chat completion.
            max_retries: Further tries, on the server, of a rollout that failed for a passing reason.
            state_columns: Further keys of the rollout's state to return.
            on_progress: Called on this loop with what the rollout reports while it runs, e.g. each turn: in order, all
                of it before this returns. While it is slow, so is the rollout.

        Returns:
            The output; a failed rollout has ``error`` set and no reward.

        Raises:
            CallError: The call itself failed: no server, servers lost, time limit, refused.
            EnvironmentCrashedError: No server is there: the env could not be loaded, and no controller tries again.
            BusError: The connection failed or was closed.
        """
        call = Call("rollout", [input], client, model, sampling_args, max_retries, state_columns)
        body = await self._call(call, on_progress)
        return cast(RolloutOutput, _field(body, "output", dict))

    async def run_group(
        self,
        group_inputs: list[RolloutInput],
        client: ClientConfig | None,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[RolloutOutput]:
        """Run rollouts of one example on one server and score them together.

        Takes as many slots as inputs. Arguments and errors as in run_rollout.

        Returns:
            One output per input, in input order.
        """
        if not group_inputs:
            return []
        call = Call("group", group_inputs, client, model, sampling_args, max_retries, state_columns)
        body = await self._call(call, on_progress)
        outputs = _field(body, "outputs", list)
        if len(outputs) != len(group_inputs) or not all(isinstance(output, dict) for output in outputs):
            raise DecodeError(f"the result does not hold {len(group_inputs)} outputs")
        return cast(list[RolloutOutput], outputs)

    async def evaluate(
        self,
        client: ClientConfig | None,
        model: str,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        max_concurrent: int = -1,
        results_path: str | Path | None = None,
        state_columns: list[str] | None = None,
        save_results: bool = False,
        independent_scoring: bool = False,
        max_retries: int = 0,
        callbacks: EvalCallbacks | None = None,
        rollout_timeout_s: float | None = None,
    ) -> GenerateOutputs:
        """Evaluate a model on the env's eval set, which comes over the bus: the env's package is not needed here.

        Args:
            num_examples: The first so many examples; -1: all.
            rollouts_per_example: Rollouts of each.
            max_concurrent: Rollouts under way at once from here, generation and scoring; -1: no limit but the servers'.
            results_path: Where to save, or what to resume.
            save_results: Save to the default place when no path is given.
            independent_scoring: Insist on single rollouts; not with an env that has group rewards.
            rollout_timeout_s: Limit for each rollout; one that takes longer is a failed row.

        Returns:
            ``{"outputs": [...], "metadata": {...}}``; failed rollouts and failed calls are rows with ``error``.

        Raises:
            NoServerError: No server of the env is there.
            UsageError: Arguments that do not fit.
        """
        info = await self.wait_for_server()
        if independent_scoring and info.requires_group_rollouts:
            raise UsageError(f"env {self.env!r} scores its rollouts in groups: independent_scoring is not possible")
        examples = await self.examples(num_examples)
        return await generate(
            self,
            repeat_examples(examples, rollouts_per_example),
            client,
            model,
            sampling_args,
            env_id=self.env_id,
            env_args=self.env_args,
            rollouts_per_example=rollouts_per_example,
            group_scoring=bool(info.requires_group_rollouts),
            max_concurrent=max_concurrent,
            results_path=results_path,
            state_columns=state_columns,
            save_results=save_results,
            max_retries=max_retries,
            rollout_timeout_s=rollout_timeout_s,
            callbacks=callbacks,
        )

    # ---- asking

    async def info(self) -> Info:
        """Return what one server says the env is.

        Raises:
            NoServerError: No server of the env is there.
            CallTimeoutError: The server gave no answer within 2 s.
        """
        return await self._inquire(lambda inquiries: inquiries.info())

    async def health(self) -> bool:
        """Whether a server of the env is there and takes jobs."""
        try:
            return (await self.info()).state == "ready"
        except EnvbusError:
            return False

    async def servers(self) -> list[Beat]:
        """Return the latest heartbeat of each server of the env; listens for a little over a second.

        Raises:
            BusPermissionError: This user may not hear heartbeats.
        """
        return await self._inquire(lambda inquiries: inquiries.servers())

    async def wait_for_server(self, *, timeout_s: float | None = None) -> Info:
        """Wait until a server of the env takes jobs.

        Args:
            timeout_s: How long; default: ``no_server_timeout_s`` for one to appear,
                ``loading_timeout_s`` for it to load.

        Raises:
            NoServerError: None appeared; says which envs are there.
            ServerLoadingError: It did not finish loading, or is there and does not answer.
            EnvironmentCrashedError: No server is there: it could not load the env, and no controller tries again.
        """
        return await self._inquire(lambda inquiries: inquiries.wait_for_server(timeout_s))

    async def examples(self, num_examples: int = -1) -> list[RolloutInput]:
        """Return the first examples of the eval set (-1: all), read page by page over the bus.

        Raises:
            BadRequestError: The env offers no eval set.
            CallTimeoutError: A page did not come in 3 tries of 10 s.
        """
        return await self._inquire(lambda inquiries: inquiries.examples(num_examples))

    async def _inquire(self, question: Callable[[Inquiries], Coroutine[Any, Any, T]]) -> T:
        bus, _ = await self._ensure_session()
        return await bus.thread.run(question(Inquiries(bus.connection, self._subjects, self._settings)))

    @property
    def is_connected(self) -> bool:
        """Whether NATS is there now: False during an outage, and before the first connection."""
        return self._bus is not None and self._bus.connection.is_up

    def stats(self) -> dict[str, float]:
        """Return counts since this client connected: of its jobs, and of what went wrong with them and the connection.

        ``jobs``, ``resent`` (their server was lost, or stalled), ``unaccepted`` (sends that got no answer), ``lost``
        (given up with ServerLostError), ``late_results``, ``late_failures`` and ``late_accepts`` (dropped: the job was
        over), ``bad_messages``; of the connection, which clients of one process may share: ``reconnects``,
        ``rebuilds``, ``slow_consumers``, ``unsent`` (messages dropped for want of room), ``outage_s``.
        """
        return {} if self._session is None else self._session.numbers.read()

    # ---- jobs

    async def _call(self, call: Call, on_progress: OnProgress | None) -> dict[str, Any]:
        if call.client is not None and not isinstance(call.client, ClientConfig):
            raise UsageError(
                f"a {type(call.client).__name__} cannot cross the bus: pass a ClientConfig; the server calls the model"
            )
        if call.size > MAX_GROUP:
            raise UsageError(f"a group has at most {MAX_GROUP:,} inputs, not {call.size:,}")
        kind, size, frozen = call.kind, call.size, freeze(call_map(call))
        bus, session = await self._ensure_session()
        body = await bus.workers.pack(frozen)
        del call, frozen  # thousands of calls may wait
        return await self._run_job(session, kind, size, body, on_progress)

    async def _run_job(
        self,
        session: Session,
        kind: Literal["rollout", "group"],
        size: int,
        body: Packed,
        on_progress: OnProgress | None,
    ) -> dict[str, Any]:
        """Submit a job and await its end; whatever ends the wait early ends the job too."""
        assert self._bus is not None
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Packed] = loop.create_future()
        here = self._crossing(loop)
        job_id = secrets.token_hex(16)
        bus_side = self._bus.thread.crossing
        watch = None
        if on_progress is not None:
            watch = Watch(on_progress, lambda report: bus_side.post(session.taken, job_id, report))
        job = ClientJob(
            job=job_id,
            call=kind,
            size=size,
            body=body,
            ending=lambda outcome: here.post(_settle, result, outcome),
            reporting=partial(here.post, watch.report) if watch is not None else None,
            deadline=None if self._timeout_s is None else time.time() + min(self._timeout_s, MAX_DEADLINE_S),
        )
        bus_side.post(session.submit, job)
        try:
            async with asyncio.timeout(self._timeout_s):
                packed = await result
            return await self._unpacked(packed)
        except TimeoutError as error:
            why = "" if (trouble := self._bus.connection.trouble) is None else f"; {trouble}"
            raise CallTimeoutError(
                f"env {self.env!r}: no result within this call's limit of {self._timeout_s:g} s{why}"
            ) from error
        finally:
            if watch is not None:
                watch.end()
            if not result.done() or result.cancelled() or job.pulled:
                bus_side.post(session.leave, job.job)

    async def _unpacked(self, packed: Packed) -> dict[str, Any]:
        assert self._bus is not None
        max_bytes = self._settings.max_result_bytes
        body = partial(unpack_body, packed.data, packed.encoding, max_bytes=max_bytes)
        return await self._bus.workers.unpack(body, packed.raw_size, limits=Limits(max_bytes=max_bytes))

    def _crossing(self, loop: asyncio.AbstractEventLoop) -> Crossing:
        if loop not in self._crossings:
            # A program may use one loop after the other, as asyncio.run does.
            self._crossings = {known: way for known, way in self._crossings.items() if not known.is_closed()}
            self._crossings[loop] = Crossing(loop)
        return self._crossings[loop]

    async def _ensure_session(self) -> tuple[Bus, Session]:
        if self._closed:
            raise UsageError("this NATSEnvClient is closed")
        if self._bus is not None and not self._bus.is_of_this_process:
            raise UsageError("this NATSEnvClient was connected before a fork: make one in each process")
        if self._bus is not None and self._session is not None:
            return self._bus, self._session
        async with self._connecting:
            if self._bus is None:
                self._bus = Bus.acquire(self._options)
            await self._bus.opened(timeout_s=self._settings.connect_timeout_s)
            if self._closed:
                raise BusClosedError("the client was closed while it connected")
            if self._session is None:
                self._session = await self._bus.thread.run(self._make_session(self._bus))
            return self._bus, self._session

    async def _make_session(self, bus: Bus) -> Session:
        return Session(
            bus.connection,
            self._subjects,
            client_id=self._client_id,
            settings=self._settings,
            workers=bus.workers,
            priority=self._priority,
            fingerprint=self._fingerprint,
        )


def _settle(result: asyncio.Future[Packed], outcome: Packed | EnvbusError) -> None:
    if result.done():
        return
    if isinstance(outcome, EnvbusError):
        result.set_exception(outcome)
    else:
        result.set_result(outcome)


def _field(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind):
        raise DecodeError(f"the result has no {name!r} of type {kind.__name__}")
    return value
