"""NATSEnvServer: one process that serves one environment. Reads as the steps of its life.

connect → be reachable as loading → load the environment (main thread) → take
jobs → drain → cancel what is left → let results be collected → tear down → leave.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from envbus.bus.address import BusOptions, resolve_bus_options
from envbus.bus.bus import Bus
from envbus.bus.lifeline import watch_lifeline
from envbus.bus.messages import Failure
from envbus.bus.subjects import DEFAULT_PREFIX, Subjects
from envbus.bus.thread import Crossing
from envbus.bus.transfer import Packed
from envbus.environments.loader import apply_settings, check_hostable, load_environment
from envbus.errors import EnvironmentLoadError, UsageError
from envbus.logs import setup_logging
from envbus.server.beats import Beats, LoopLag
from envbus.server.catalogue import Catalogue
from envbus.server.control import ControlDesk
from envbus.server.identity import new_identity
from envbus.server.microservice import MicroService
from envbus.server.model_endpoints import KeyPolicy, ModelEndpoints
from envbus.server.pages import Pages
from envbus.server.reception import Reception
from envbus.server.runner import Runner, Tally, Work
from envbus.settings import ServerSettings
from envbus.types import HostableEnvironment

log = logging.getLogger("envbus.server")

DEFAULT_MAX_CONCURRENT = 64
LEAVE_TIMEOUT_S = 5.0
"""How long run_server waits, after the stop, for tasks and threads that the environment left."""


class LoadInterruptedError(BaseException):
    """SIGTERM or SIGINT while the environment was loading; no Exception, so that loading code cannot swallow it."""


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
        self._endpoints = ModelEndpoints(KeyPolicy(allow_keys))
        self._environment = environment
        self._extra_env_kwargs = dict(extra_env_kwargs or {})
        self._handle_signals = handle_signals
        self._lifeline_fd = lifeline_fd
        self._stop_asked = asyncio.Event()
        self._grace_begins = asyncio.Event()
        self._stop_at_once = asyncio.Event()
        self._ended = asyncio.Event()
        self._orphaned = False
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
        """
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
        self._grace_begins.set()
        self._stop_asked.set()
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

        leave = threading.Timer(LEAVE_TIMEOUT_S, _leave)
        leave.daemon = True

        async def serve() -> None:
            await cls(env_id, env_args, address, **options).run()
            leave.start()

        try:
            asyncio.run(serve())
        except LoadInterruptedError:
            log.info("stopped while the environment was loading")
        finally:
            leave.cancel()

    async def _run(self) -> None:
        if self._lifeline_fd is not None:
            watch_lifeline(self._lifeline_fd, self._on_parent_gone, hard_exit_after_s=self._longest_stop_s)
        await asyncio.wrap_future(self._bus.open(timeout_s=None))
        await self._bus.thread.run(self._open_desks())
        log.info(
            "server %s of env %s is loading on %s",
            self.server_id,
            self.env,
            self._options.describe(),
            extra={"server": self.server_id, "env": self.env},
        )
        try:
            environment = await self._load()
            try:
                await self._serve(environment)
            finally:
                await self._tear_down(environment)
        finally:
            await self._bus.thread.run(self._close_desks())
            await self._endpoints.close()
        log.info("server %s has stopped", self.server_id)

    async def _open_pages(self) -> None:
        """Before NATS is reached: a server that waits for it is alive, but not ready."""
        if self._metrics_port is None:
            return
        port = await self._bus.thread.run(self._pages.open(self._metrics_port, self._metrics_host))
        log.info("metrics and health are at http://%s:%d/metrics, /livez and /readyz", self._metrics_host, port)

    async def _serve(self, environment: HostableEnvironment) -> None:
        self._runner = Runner(environment, endpoints=self._endpoints, report=self._report, server_id=self.server_id)
        with self._loop_signals():
            await self._catalogue.describe(environment)
            await self._bus.thread.run(self._be_ready())
            log.info("server %s of env %s is ready, %d slots", self.server_id, self.env, self._max_concurrent)
            await self._stop_asked.wait()
            log.info("server %s is draining", self.server_id)
            await self._drain()

    async def _drain(self) -> None:
        reception, thread = self._reception, self._bus.thread
        await thread.run(_call(reception.drain))
        # An operator's drain cuts no rollout: the grace begins when a stop is asked for as well.
        await self._bounded(thread.run(reception.idle()), None, until=self._grace_begins)
        await self._bounded(thread.run(reception.idle()), self._settings.grace_s, until=self._stop_at_once)
        await thread.run(_call(reception.stop_running))
        assert self._runner is not None
        await self._runner.stop(timeout_s=self._settings.teardown_timeout_s)
        if not self._orphaned:
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
            return _hostable(self._environment)
        try:
            with self._load_signals():
                environment = _hostable(load_environment(self._identity.env_id, **self._identity.env_args))
                apply_settings(environment, self._extra_env_kwargs)
                return environment
        except Exception as error:
            self._beats.error = f"{type(error).__name__}: {error}"
            await self._bus.thread.run(self._beats.send())
            raise

    @contextmanager
    def _load_signals(self) -> Iterator[None]:
        if not self._owns_signals:
            yield
            return

        def interrupt(signum: int, frame: FrameType | None) -> None:
            raise LoadInterruptedError(signal.Signals(signum).name)

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _loop_signals(self) -> Iterator[None]:
        if not self._owns_signals:
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            self._loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            # Ignored from here on: the teardown that follows runs to its end.
            for number in numbers:
                self._loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    @property
    def _owns_signals(self) -> bool:
        return self._handle_signals and threading.current_thread() is threading.main_thread()

    def _on_signal(self) -> None:
        if self._grace_begins.is_set():
            log.warning("second signal: running rollouts are cancelled now")
            self._stop_at_once.set()
        self._grace_begins.set()
        self._stop_asked.set()

    def _on_parent_gone(self) -> None:
        """On the lifeline's thread: nobody is left to collect anything, so only cleanup remains."""
        self._orphaned = True
        self._crossing.post(self._stop_at_once.set)
        self._crossing.post(self._grace_begins.set)
        self._crossing.post(self._stop_asked.set)

    @property
    def _longest_stop_s(self) -> float:
        return self._settings.collect_grace_s + self._settings.teardown_timeout_s

    # ---- the bus thread's side

    async def _open_desks(self) -> None:
        """On the bus loop: be reachable, though still loading."""
        connection, settings = self._bus.connection, self._settings
        self._back = self._bus.thread.crossing
        self._reception = Reception(
            connection,
            self._subjects,
            server_id=self.server_id,
            settings=settings,
            capacity=self._max_concurrent,
            fingerprint=self._identity.fingerprint,
            runner=self,
        )
        lag = LoopLag(self._crossing, self._back)
        self._beats = Beats(
            connection,
            self._subjects,
            self._reception,
            identity=self._identity,
            lag=lag.measure,
            interval_s=settings.beat_interval_s,
            controller=self._controller,
        )
        self._catalogue = Catalogue(
            connection, self._subjects, self._reception, identity=self._identity, settings=settings
        )
        self._control = ControlDesk(
            connection, self._subjects, self._reception, stop=self._on_operator_stop, log_file=self._log_file
        )
        await self._reception.open()
        await self._catalogue.open()
        await self._control.open(self.server_id)
        self._service = MicroService(
            connection,
            self._subjects,
            self._reception,
            self._catalogue,
            identity=self._identity,
            beat=self._beats.now,
        )
        await self._service.open()
        self._pages.beat = self._beats.now
        self._beating = asyncio.get_running_loop().create_task(self._beats.run())

    async def _be_ready(self) -> None:
        self._reception.ready()
        await self._beats.send()

    async def _close_desks(self) -> None:
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await self._service.close()
        await self._control.close()
        await self._catalogue.close()
        await self._reception.close()

    def _on_operator_stop(self, action: str) -> None:
        if action == "stop":
            self._crossing.post(self._grace_begins.set)
        self._crossing.post(self._stop_asked.set)

    # ---- between reception (bus thread) and runner (this loop)

    def start(self, work: Work) -> None:
        """RunnerPort: start a job, from the bus thread."""
        self._crossing.post(self._start_here, work)

    def cancel(self, job: str) -> None:
        """RunnerPort: cancel a job, from the bus thread."""
        self._crossing.post(self._cancel_here, job)

    def _start_here(self, work: Work) -> None:
        assert self._runner is not None
        self._runner.start(work)

    def _cancel_here(self, job: str) -> None:
        if self._runner is not None:
            self._runner.cancel(job)

    def _report(self, job: str, outcome: Packed | Failure, tally: Tally) -> None:
        self._back.post(self._reception.finished, job, outcome, tally)


def _leave() -> None:
    log.error("the environment left tasks or threads that do not end; leaving without them")
    os._exit(0)


def _hostable(environment: Any) -> HostableEnvironment:
    missing = check_hostable(environment)
    if missing:
        raise EnvironmentLoadError(
            f"a {type(environment).__name__} cannot be served: it has no {', '.join(missing)}; "
            "see docs/environments.md, 'Hosting protocol'"
        )
    return cast(HostableEnvironment, environment)


async def _call(function: Any) -> None:
    function()
