"""NATSEnvServer: one process that serves one environment. Reads as the steps of its life.

connect → be reachable as loading → load the environment (main thread) → take
jobs → drain → cancel what is left → let results be collected → tear down → leave.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import multiprocessing
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from envbus.adapters.hosting import hosted, load_hosted
from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.bus import Bus
from envbus.bus.lifeline import watch_lifeline
from envbus.bus.messages import Failure
from envbus.bus.subjects import DEFAULT_PREFIX, Subjects
from envbus.bus.thread import Crossing
from envbus.bus.transfer import Packed
from envbus.environments.loader import apply_settings, check_hostable
from envbus.error_chain import ErrorChain
from envbus.errors import EnvironmentCrashedError, EnvironmentLoadError, UsageError
from envbus.logs import setup_logging
from envbus.server.desks import DeskOptions, Desks
from envbus.server.identity import new_identity
from envbus.server.model_endpoints import KeyPolicy, ModelEndpoints
from envbus.server.pages import Pages
from envbus.server.rollout_log import life_in_numbers
from envbus.server.runner import Runner, Tally, Work
from envbus.server.stops import LEAVE_TIMEOUT_S, LoadInterruptedError, Stops, leave_soon, leave_without_leftovers
from envbus.settings import ServerSettings
from envbus.types import HostableEnvironment

log = logging.getLogger("envbus.server")

DEFAULT_MAX_CONCURRENT = 64


class NATSEnvServer:
    """Serves one environment on the bus.

    Args:
        env_id: As given to load_environment.
        env_args: Its arguments; JSON values.
        address: NATS address(es); default ENVBUS_URL, NATS_URL, then the NATS CLI's context.
        name: The env's name on the bus; default env_id, with arguments also their digest.
        max_concurrent: Rollouts at once (slots).
        prefix: First token of all subjects.
        environment: Serve this object instead of loading one.
        extra_env_kwargs: Settings of the loaded environment, see Environment.set_kwargs.
        allow_keys: ``"VARIABLE=ORIGIN"`` pairs: which API keys rollouts may use, and where.
        allow_urls: Patterns of model URLs that may be called without a key, e.g. ``"http://10.0.*:8000"``.
        model_proxy: Call models through the proxies that the environment names.
        settings: Time limits and sizes.
        log_level: Level of the ``envbus`` loggers; None leaves logging as the program set it up.
        log_file: Also log to this file.
        json_logs: Log lines as JSON objects.
        lifeline_fd: File descriptor that ends this server when it closes (its parent's death).
        server_id: Its id on the bus; default: a random one.
        controller: Id of the controller that launches it, shown in heartbeats.
        metrics_port: Serve /metrics, /livez and /readyz over HTTP on this port; 0 takes a free one.
        metrics_host: Address to serve them on.
        handle_signals: Drain on SIGTERM and SIGINT; only where run() is called in the main thread.

    Raises:
        UsageError: An argument is not usable.
    """

    def __init__(
        self,
        env_id: str,
        env_args: Mapping[str, Any] | None = None,
        address: str | Sequence[str] | BusOptions | None = None,
        *,
        name: str | None = None,
        max_concurrent: int = DEFAULT_MAX_CONCURRENT,
        prefix: str = DEFAULT_PREFIX,
        environment: HostableEnvironment | None = None,
        extra_env_kwargs: Mapping[str, Any] | None = None,
        allow_keys: Iterable[str] = (),
        allow_urls: Iterable[str] = (),
        model_proxy: bool = False,
        settings: ServerSettings | None = None,
        log_level: str | None = None,
        log_file: str | Path | None = None,
        json_logs: bool = False,
        lifeline_fd: int | None = None,
        server_id: str | None = None,
        controller: str | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "0.0.0.0",
        handle_signals: bool = True,
    ) -> None:
        if max_concurrent < 1:
            raise UsageError(f"max_concurrent must be at least 1, not {max_concurrent}")
        self._options = resolve_bus_options(address)
        self._settings = settings or ServerSettings()
        self._identity = new_identity(env_id, env_args, name, server_id)
        self._controller = controller
        self._log_file = log_file
        self._metrics_port = metrics_port
        self._metrics_host = metrics_host
        self._subjects = Subjects(self._identity.env, prefix)
        self._max_concurrent = max_concurrent
        self._model_proxy = model_proxy
        policy = KeyPolicy(allow_keys, allow_urls, server_id=self._identity.server_id)
        self._endpoints = ModelEndpoints(policy, model_proxy=model_proxy)
        self._environment = environment
        self._extra_env_kwargs = dict(extra_env_kwargs or {})
        self._lifeline_fd = lifeline_fd
        self._stops = Stops(handle_signals=handle_signals)
        self._ended = asyncio.Event()
        self._started = False
        if log_level is not None:
            setup_logging(log_level, log_file=log_file, json=json_logs)

    @property
    def server_id(self) -> str:
        """This server's id on the bus."""
        return self._identity.server_id

    @property
    def env(self) -> str:
        """The env's name on the bus."""
        return self._identity.env

    # ---- life

    async def run(self) -> None:
        """Serve until close(), a signal, or an operator's stop.

        Raises:
            EnvironmentLoadError: The environment could not be loaded.
            BusAuthError: NATS refused the credentials.
            BusPermissionError: This user may not do all that a server needs.
        """
        with self._stops.keeping_signals():
            await self._run_on_bus()

    async def _run_on_bus(self) -> None:
        self._started = True
        self._loop = asyncio.get_running_loop()
        self._crossing = Crossing(self._loop)
        self._runner: Runner | None = None
        self._bus = Bus.acquire(self._options)
        self._pages = Pages(self._bus.connection)
        try:
            await self._open_pages()
            await self._run()
        finally:
            await self._bus.thread.run(self._pages.close())
            await asyncio.to_thread(self._bus.release)
            self._ended.set()

    async def close(self) -> None:
        """Stop as a SIGTERM would, and wait for the end."""
        self._stops.stop()
        if self._started:
            await self._ended.wait()

    @classmethod
    def run_server(
        cls,
        env_id: str,
        env_args: Mapping[str, Any] | None = None,
        address: str | Sequence[str] | BusOptions | None = None,
        **options: Any,
    ) -> None:
        """Serve in this process until stopped: the target of a ``multiprocessing.Process``.

        Takes the arguments of NATSEnvServer.
        """
        options.setdefault("log_level", "INFO")

        async def serve() -> threading.Timer:
            await cls(env_id, env_args, address, **options).run()
            return leave_soon(LEAVE_TIMEOUT_S, leave_without_leftovers)

        try:
            leaving = asyncio.run(serve())
            if multiprocessing.parent_process() is None:
                leaving.cancel()  # the program goes on; a child of multiprocessing still has to end its threads
        except LoadInterruptedError:
            log.info("stopped while the environment was loading")

    async def _run(self) -> None:
        if self._lifeline_fd is not None:
            watch_lifeline(self._lifeline_fd, self._on_parent_gone, hard_exit_after_s=self._longest_stop_s)
        if not await self._connected():
            return
        await self._bus.thread.run(self._open_desks())
        log.info(
            "server %s of env %s is loading on %s",
            self.server_id,
            self.env,
            self._options.describe(),
            extra={"server": self.server_id, "env": self.env},
        )
        try:
            await self._bus.thread.run(self._desks.check_allowed())
            environment = await self._load()
            try:
                await self._serve(environment)
            finally:
                await self._tear_down(environment)
        finally:
            await self._bus.thread.run(self._desks.close())
            await self._endpoints.close()
        counts = self._desks.reception.counts
        who = {"server": self.server_id, "env": self.env}
        log.info("server %s has stopped: %s", self.server_id, life_in_numbers(counts), extra=who)

    async def _connected(self) -> bool:
        """Wait for NATS; False if the stop came first."""
        return await self._done_before_stop(asyncio.wrap_future(self._bus.open(timeout_s=None)))

    async def _opened(self, environment: HostableEnvironment) -> bool:
        """Let the environment start what its rollouts share, if it says how; False if the stop came first."""
        if not inspect.iscoroutinefunction(start := getattr(environment, "open", None)):
            return True
        opening = asyncio.ensure_future(start())
        try:
            return await self._done_before_stop(opening)
        except Exception as error:
            await self._bus.thread.run(self._desks.load_failed(f"{type(error).__name__}: {error}"))
            raise EnvironmentCrashedError(f"env {self.env} could not start: {ErrorChain(error)!r}") from error
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    async def _done_before_stop(self, opening: asyncio.Future[Any]) -> bool:
        stopped = asyncio.ensure_future(self._stops.asked.wait())
        try:
            either: set[asyncio.Future[Any]] = {opening, stopped}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                await opening
            return opening.done()
        finally:
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)

    async def _open_pages(self) -> None:
        """Before NATS is reached: a server that waits for it is alive, but not ready."""
        if self._metrics_port is None:
            return
        port = await self._bus.thread.run(self._pages.open(self._metrics_port, self._metrics_host))
        log.info("metrics and health are at http://%s:%d/metrics, /livez and /readyz", self._metrics_host, port)

    async def _serve(self, environment: HostableEnvironment) -> None:
        self._runner = Runner(
            environment,
            endpoints=self._endpoints,
            workers=self._bus.workers,
            report=self._report,
            progress=self._progress,
            progress_window_bytes=self._settings.progress_window_bytes,
            server_id=self.server_id,
            env=self.env,
        )
        with self._stops.while_serving(self._loop):
            if not await self._opened(environment):
                return
            await self._desks.catalogue.describe(environment)
            await self._bus.thread.run(self._desks.ready())
            room = f"{self._max_concurrent} slots{self._endpoints.remark}"
            log.info("server %s of env %s is ready, %s", self.server_id, self.env, room)
            await self._stops.asked.wait()
            log.info("server %s is draining", self.server_id)
            await self._drain()

    async def _drain(self) -> None:
        desks, thread, stops = self._desks, self._bus.thread, self._stops
        reception = desks.reception
        await thread.run(desks.drain())
        # An operator's drain cuts no rollout: the grace begins when a stop is asked for as well.
        await self._bounded(thread.run(reception.idle()), None, until=stops.grace_begun)
        await self._bounded(thread.run(reception.idle()), self._settings.grace_s, until=stops.at_once)
        await thread.run(desks.stop_running())
        assert self._runner is not None
        await self._runner.stop(timeout_s=self._settings.teardown_timeout_s)
        if not stops.orphaned:
            await self._bounded(thread.run(reception.collected()), self._settings.collect_grace_s)

    async def _bounded(self, waiting: Any, limit_s: float | None, *, until: asyncio.Event | None = None) -> None:
        """Await something for so long, or until an event cuts it short."""
        tasks = {asyncio.ensure_future(waiting)}
        if until is not None:
            tasks.add(asyncio.ensure_future(until.wait()))
        await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tear_down(self, environment: HostableEnvironment) -> None:
        try:
            async with asyncio.timeout(self._settings.teardown_timeout_s):
                await environment.close()
        except TimeoutError:
            log.error("teardown of env %s took over %g s", self.env, self._settings.teardown_timeout_s)
        except Exception:
            log.exception("teardown of env %s failed", self.env)

    # ---- loading

    async def _load(self) -> HostableEnvironment:
        """Load in the main thread: libraries of environments install signal handlers and event loops there."""
        if self._environment is not None:
            return _hostable(hosted(self._environment))
        try:
            with self._stops.while_loading():
                identity = self._identity
                loaded = load_hosted(
                    identity.env_id,
                    identity.env_args,
                    max_concurrent=self._max_concurrent,
                    model_proxy=self._model_proxy,
                )
                environment = _hostable(loaded)
                apply_settings(environment, self._extra_env_kwargs)
                return environment
        except Exception as error:
            await self._bus.thread.run(self._desks.load_failed(f"{type(error).__name__}: {error}"))
            raise

    def _on_parent_gone(self) -> None:
        self._stops.parent_gone(self._crossing, is_loading=self._runner is None)

    @property
    def _longest_stop_s(self) -> float:
        return self._settings.collect_grace_s + self._settings.teardown_timeout_s

    # ---- the bus thread's side

    async def _open_desks(self) -> None:
        """On the bus loop."""
        options = DeskOptions(
            self._identity, self._settings, self._max_concurrent, log_file=self._log_file, controller=self._controller
        )
        self._desks = Desks(
            self._bus.connection,
            self._subjects,
            options,
            runner=self,
            env_loop=self._crossing,
            bus_loop=self._bus.thread.crossing,
            stop=self._on_operator,
        )
        await self._desks.open()
        self._pages.beat = self._desks.beats.now

    def _on_operator(self, action: str) -> None:
        self._crossing.post(self._stops.stop if action == "stop" else self._stops.drain)

    # ---- between reception (bus thread) and runner (this loop)

    def start(self, work: Work) -> None:
        """RunnerPort: start a job, from the bus thread."""
        self._crossing.post(self._start_here, work)

    def cancel(self, job: str) -> None:
        """RunnerPort: cancel a job, from the bus thread."""
        self._crossing.post(self._cancel_here, job)

    def heard(self, job: str, attempt: int, freed_bytes: int) -> None:
        """RunnerPort: there is room for progress again, from the bus thread."""
        self._crossing.post(self._heard_here, job, attempt, freed_bytes)

    def _start_here(self, work: Work) -> None:
        assert self._runner is not None
        self._runner.start(work)

    def _cancel_here(self, job: str) -> None:
        if self._runner is not None:
            self._runner.cancel(job)

    def _heard_here(self, job: str, attempt: int, freed_bytes: int) -> None:
        if self._runner is not None:
            self._runner.heard(job, attempt, freed_bytes)

    def _progress(self, job: str, attempt: int, body: bytes) -> None:
        self._bus.thread.crossing.post(self._desks.reception.streams.put, job, attempt, body)

    def _report(self, job: str, outcome: Packed | Failure, tally: Tally) -> None:
        self._bus.thread.crossing.post(self._desks.reception.finished, job, outcome, tally)


def _hostable(environment: Any) -> HostableEnvironment:
    missing = check_hostable(environment)
    if missing:
        raise EnvironmentLoadError(
            f"a {type(environment).__name__} cannot be served: it has no {', '.join(missing)}; "
            "see docs/environments.md, 'Hosting protocol'"
        )
    return cast(HostableEnvironment, environment)
