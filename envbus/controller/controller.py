"""The controller: runs the servers of a fleet file on this host. Carries out what the supervisors decide.

open the bus → claim the name → take over or launch → watch, obey, beat → stop all
servers at the same time → leave. Everything here runs on one event loop that no
environment's code can block.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from envbus.bus.connection import Connection, Listener, Subscription
from envbus.bus.control_messages import (
    ControllerBeat,
    LogLines,
    LogsRequest,
    Restart,
    Scale,
    StatusRequest,
)
from envbus.bus.dialer import RECONNECT_MAX_S
from envbus.bus.messages import Beat, Control, Gone, pack, parse_as
from envbus.bus.subjects import parse_beat
from envbus.bus.tasks import TaskSet
from envbus.controller.adoption import ServerRegister
from envbus.controller.autoscale import Autoscaler
from envbus.controller.confinement import unset_variables
from envbus.controller.control_api import ControlApi, name_taken_text
from envbus.controller.controller_bus import ControllerBus, StoppedEarlyError
from envbus.controller.demand import ended_jobs
from envbus.controller.host_checks import check_host
from envbus.controller.instructions import Ask, Drain, Instruction, Kill, Launch, Note, Stop
from envbus.controller.liveness import BLOCKED_LAG_S, Signs
from envbus.controller.managed_env import ManagedEnv
from envbus.controller.pages import FleetPages
from envbus.controller.processes import Ended, Processes, Record, clear_remains
from envbus.controller.reports import BEAT_S, Reports
from envbus.controller.spec import FleetSpec
from envbus.errors import BadRequestError, EnvbusError, NoServerError, UsageError
from envbus.model_urls import LOOPBACK_PATTERNS
from envbus.notices import Notices

log = logging.getLogger("envbus.controller")

POLL_S = 0.05
"""How soon the end of a process is seen."""
TICK_S = 0.25
ASK_TIMEOUT_S = 2.0
RETURN_S = RECONNECT_MAX_S + 2.0
"""After an outage the servers may need this long to be back, too."""


class Controller:
    """Runs a fleet's servers on this host until it is stopped.

    Args:
        spec: What to run.
        tell: Gets what an operator should read at once; default: it is logged.

    Raises:
        UsageError: The address of NATS is of no use.
    """

    def __init__(self, spec: FleetSpec, *, tell: Callable[[Note], None] | None = None) -> None:
        self._spec = spec
        self._id = spec.controller_id
        self._tell = tell or _log_note
        self._notices = Notices(log, {"controller": self._id})
        self._bus = ControllerBus(spec, say=self._say)
        self._envs = {env.bus_name: ManagedEnv(env, controller_id=self._id, prefix=spec.bus.prefix) for env in spec.env}
        self._register = ServerRegister(spec.controller.log_dir)
        self._connection: Connection
        self._processes: Processes
        self._reports: Reports
        self._api: ControlApi
        self._pages: FleetPages
        self._stopping = False
        self._leaving = False
        self._ending = asyncio.Event()
        """One of the two."""
        self._error: EnvbusError | None = None
        self._tasks = TaskSet("the controller")
        self._remains = TaskSet("the controller")
        """Look for what ended servers have left, and kill it."""

    @property
    def controller_id(self) -> str:
        """Its name on the bus."""
        return self._id

    # ---- life

    async def run(self) -> None:
        """Run until stop(), or an operator's order to stop.

        Raises:
            UsageError: Another controller has this one's name, the embedded NATS cannot run, or this host cannot
                isolate the servers as wanted.
            BusAuthError: NATS refused the credentials.
            BusPermissionError: This user may not do all that a controller needs.
        """
        await asyncio.to_thread(check_host, self._spec)
        try:
            await self._run_on_bus()
        except StoppedEarlyError:
            self._say("stopped before NATS was there")
        if self._error is not None:
            raise self._error

    async def _run_on_bus(self) -> None:
        async with self._bus.open(until=self._ending) as (connection, variables):
            self._connection = connection
            connection.listen(Listener(on_reconnected=lambda outage_s: self._stand_still(RETURN_S)))
            self._processes = Processes(
                self._id,
                self._spec.controller,
                prefix=self._spec.bus.prefix,
                variables=variables,
                allow_urls=LOOPBACK_PATTERNS if self._bus.nats is not None else (),
            )
            self._reports = Reports(self._id, self._envs, self._processes)
            self._api = ControlApi(
                connection, self._id, prefix=self._spec.bus.prefix, orders=self, notices=self._notices
            )
            self._pages = FleetPages(connection, self._spec.bus.prefix, not_ready=self._not_ready)
            try:
                await self._api.open()
                await self._open_pages()
                await self._serve()
            finally:
                await self._tasks.close()
                await self._remains.close()
                await self._pages.close()
                await self._api.close()
                self._processes.close()
                self._notices.close(_now())

    def stop(self) -> None:
        """Drain all servers, each within its grace, and end; a second time: cancel what still runs."""
        if self._stopping:
            self._say("stopping now: running rollouts are cancelled, teardown still runs", "warning")
            self._obey(order for env in self._envs.values() for order in env.supervisor.hurry())
            return
        self._stopping = True
        self._ending.set()
        now = _now()
        self._obey(order for env in self._envs.values() for order in env.supervisor.stop(now))
        count = sum(len(env.supervisor.servers()) for env in self._envs.values())
        self._say(f"stopping {count} servers; once more to cancel their rollouts")

    def leave(self) -> None:
        """End without the servers, which the next controller of this name takes over; only with adopt.

        Without adopt the same as stop().
        """
        if not self._spec.controller.adopt:
            self.stop()
            return
        self._leaving = True
        self._ending.set()

    async def _open_pages(self) -> None:
        if self._spec.controller.metrics_port is not None:
            host = self._spec.controller.metrics_host
            port = await self._pages.open(self._spec.controller.metrics_port, host=host)
            self._say(f"metrics of the fleet, and health, are at http://{host}:{port}/metrics, /livez and /readyz")

    def _not_ready(self) -> str | None:
        return "stopping" if self._stopping else None

    async def _serve(self) -> None:
        self._adopt()
        subscriptions = [await self._hear(env) for env in self._envs.values()]
        try:
            await self._check_allowed()
            self._say(f"controller {self._id} runs; logs are in {self._spec.controller.log_dir}")
            for env in self._envs.values():
                if unset := unset_variables(env.spec):
                    self._say(f"not set here, though inherit names it: {', '.join(unset)}", "warning", env=env.name)
            now = _now()
            if not self._ending.is_set():
                self._obey(order for env in self._envs.values() for order in env.supervisor.start(now))
            self._tasks.spawn(self._beat_forever())
            await self._watch()
            await self._api.send_beat()
        finally:
            for subscription in subscriptions:
                await self._connection.leave(subscription)

    async def _check_allowed(self) -> None:
        """Wait until NATS has judged all that a controller needs; what is sent for that is for nobody."""
        nobody, published = secrets.token_hex(16), []
        for env in self._envs.values():
            for subject, message in (
                (env.subjects.ctl(nobody), StatusRequest()),
                (env.subjects.gone, Gone(server=nobody)),
            ):
                published.append(subject)
                await self._connection.publish(subject, pack(message))
        await self._api.send_beat()
        beats = [env.subjects.beats for env in self._envs.values()]
        await self._connection.check_allowed(
            *beats, *self._api.subscribed, published=[*published, self._api.beat_subject]
        )

    async def _watch(self) -> None:
        """Look after the processes until all have ended after a stop, or they are left."""
        before = ticked_at = _now()
        while not self._leaving and (not self._stopping or self._processes.records() or self._remains):
            now = _now()
            if not self._connection.is_up:
                self._stand_still(now - before)
            before = now
            for ended in self._processes.ended():
                self._on_ended(ended)
            if now - ticked_at >= TICK_S:
                ticked_at = now
                self._obey(order for env in self._envs.values() for order in env.supervisor.tick(now))
                await self._bus.keep()
                self._notices.tick(now)
            await asyncio.sleep(POLL_S)

    def _stand_still(self, seconds: float) -> None:
        """Nothing could be heard for so long: that is nobody's fault."""
        for env in self._envs.values():
            env.supervisor.outage(seconds)
            if env.autoscaler is not None:
                env.autoscaler.outage(seconds)

    def _adopt(self) -> None:
        """Also without adopt: servers that an adopting controller has left must not get doubles."""
        for record in self._register.read():
            if not self._processes.adopt(record):
                self._remains.spawn(_clear_remains(record))
                continue
            env = self._envs.get(record.env)
            if env is None:
                self._say(f"server {record.server[:8]} is not wanted any more", env=record.env)
                env = self._envs[record.env] = ManagedEnv.leftover(record.env, self._id, self._spec.bus.prefix)
            order = env.supervisor.adopt(
                record.server,
                slot=record.slot,
                generation=record.generation,
                is_wanted=record.digest == env.spec.digest,
                now=_now(),
            )
            self._obey(order)

    # ---- what the supervisors decide

    def _obey(self, orders: Iterable[Instruction]) -> None:
        queue = deque(orders)
        while queue:
            order = queue.popleft()
            match order:
                case Launch():
                    queue.extend(self._launch(order))
                case Drain(env=env, server=server):
                    self._tasks.spawn(self._ask_to_drain(env, server))
                case Stop(server=server):
                    self._processes.stop(server)
                case Kill(server=server):
                    self._processes.kill(server)
                case Ask(env=env, server=server):
                    self._tasks.spawn(self._ask(env, server))
                case Note(server=server, facts=facts):
                    self._tell(order if facts or not server else replace(order, facts=self._facts(order)))

    def _facts(self, note: Note) -> dict[str, Any]:
        record, in_flight = self._processes.record(note.server), self._envs[note.env].demand.in_flight(note.server)
        facts = {"pid": record.pid if record is not None else None, "in_flight": in_flight}
        return {name: value for name, value in facts.items() if value is not None}

    def _launch(self, order: Launch) -> list[Instruction]:
        env = self._envs[order.env]
        try:
            record = self._processes.launch(order, env.spec)
        except (OSError, UsageError) as error:
            return env.supervisor.exited(order.server, f"cannot be started: {error}", _now())
        log.debug("launched", extra={"server": order.server, "env": order.env, "place": order.slot, "pid": record.pid})
        self._note_servers()
        return []

    def _note_servers(self) -> None:
        if not self._spec.controller.adopt:
            return
        try:
            self._register.write(self._processes.records())
        except OSError as error:
            self._say(f"cannot note the servers, which would not be found again: {error}", "error")

    async def _ask_to_drain(self, env: str, server: str) -> None:
        order = pack(Control(action="drain"))
        with contextlib.suppress(TimeoutError, EnvbusError):  # asked again until it has ended
            await self._connection.request(self._envs[env].subjects.ctl(server), order, timeout_s=ASK_TIMEOUT_S)

    async def _ask(self, env: str, server: str) -> None:
        subject = self._envs[env].subjects.ctl(server)
        try:
            await self._connection.request(subject, pack(StatusRequest()), timeout_s=ASK_TIMEOUT_S)
        except (TimeoutError, NoServerError):
            return
        except EnvbusError as error:
            text = f"server {server[:8]} could not be asked: {error}"
            self._notices.note("not asked", text, _now(), fields={"server": server, "env": env})
            return
        self._envs[env].supervisor.heard(server, _now())

    # ---- what happens

    async def _hear(self, env: ManagedEnv) -> Subscription:
        return await self._connection.subscribe(env.subjects.beats, lambda message: self._on_beat(env, message))

    def _on_beat(self, env: ManagedEnv, message: Any) -> None:
        try:
            beat = parse_as(message.data, Beat)
        except EnvbusError as error:
            self._notices.note("bad beat", f"a heartbeat was dropped: {error}", _now(), fields={"env": env.name})
            return
        if parse_beat(message.subject, self._spec.bus.prefix) != (env.name, beat.server):
            return  # NATS checks who may publish where, so a beat counts only on its own subject
        now = _now()
        env.demand.beat(beat, now)
        stranger = env.demand.stranger(beat)
        if stranger is not None:
            text = f"{stranger} serves another version or other arguments under this name; give one another name"
            self._say(text, "warning", env=env.name)
        if self._processes.record(beat.server) is None:
            return
        signs = Signs(
            state=beat.state,
            in_flight=beat.in_flight,
            waiting=beat.waiting_jobs,
            ended=ended_jobs(beat),
            lag_s=beat.loop_lag_s,
            cpu_s=self._processes.cpu_s(beat.server) if beat.loop_lag_s >= BLOCKED_LAG_S else None,
        )
        self._obey(env.supervisor.beat(beat.server, signs, now))

    def _on_ended(self, ended: Ended) -> None:
        record = ended.record
        env = self._envs[record.env]
        self._connection.send(env.subjects.gone, pack(Gone(server=record.server, reason=ended.summary)))
        self._note_servers()
        self._remains.spawn(_clear_remains(record))
        facts = {"pid": record.pid, "exit": ended.how, "in_flight": env.demand.in_flight(record.server)}
        env.demand.gone(record.server)
        orders = env.supervisor.exited(record.server, ended.reason, _now())
        self._obey(_with_facts(order, record.server, facts) for order in orders)
        self._tasks.spawn(self._api.send_beat())

    async def _beat_forever(self) -> None:
        while True:
            await self._api.send_beat()
            now = _now()
            for env in self._envs.values():
                env.demand.forget_silent(now)
                if env.autoscaler is not None and self._connection.is_up and not self._stopping:
                    self._autoscale(env, env.autoscaler, now)
            await asyncio.sleep(BEAT_S)

    def _autoscale(self, env: ManagedEnv, autoscaler: Autoscaler, now: float) -> None:
        replicas = env.supervisor.replicas
        wanted = autoscaler.decide(env.demand.load(), replicas, now)
        if wanted != replicas:
            self._say(f"autoscale: {replicas} → {wanted} servers", env=env.name)
            self._obey(env.supervisor.scale(wanted, now))

    # ---- operators' orders

    def report(self) -> ControllerBeat:
        """What it runs."""
        return self._reports.beat()

    def scale(self, order: Scale) -> str:
        """Obey an operator."""
        env = self._find(order.env)
        if env.autoscaler is not None:
            raise BadRequestError(f"env {env.name} scales itself on this controller; change its autoscale limits")
        self._obey(env.supervisor.scale(order.replicas, _now()))
        return f"{order.replicas} servers of env {env.name}"

    def restart(self, order: Restart) -> str:
        """Obey an operator."""
        env = self._find(order.env)
        self._obey(env.supervisor.restart(_now()))
        return f"rolling restart of {env.supervisor.replicas} servers of env {env.name}"

    async def read_log(self, request: LogsRequest) -> LogLines:
        """Lines of the log of one of the servers, running or the last one in its place."""
        return await self._reports.read_log(request, max_payload=self._connection.max_payload)

    def on_rival(self, beat: ControllerBeat) -> None:
        """Of two controllers with one name, the younger one ends."""
        if (self._reports.started_at, os.getpid()) > (beat.started_at, beat.pid) and self._error is None:
            self._error = UsageError(name_taken_text(beat))
            if not self._stopping:
                self.stop()

    def _find(self, name: str) -> ManagedEnv:
        if self._stopping:
            raise BadRequestError(f"controller {self._id} is stopping")
        wanted = {env.name: env for env in self._envs.values() if env.is_wanted}
        if name not in wanted:
            raise BadRequestError(f"controller {self._id} has no env {name!r}; it has: {', '.join(wanted)}")
        return wanted[name]

    # ---- small things

    def _say(self, text: str, level: Any = "info", *, env: str = "") -> None:
        self._obey([Note(env or self._id, text, level)])


async def _clear_remains(record: Record) -> None:
    killed, left = await asyncio.to_thread(clear_remains, record)
    about = {"server": record.server}
    if killed:
        text = "%d processes that server %s had started were left and are killed"
        log.info(text, killed, record.server, extra=about)
    if left:
        log.warning("of server %s this could not be removed: %s", record.server, ", ".join(left), extra=about)


def _with_facts(order: Instruction, server: str, facts: dict[str, Any]) -> Instruction:
    known = {name: value for name, value in facts.items() if value is not None}
    return replace(order, facts=known) if isinstance(order, Note) and order.server == server else order


def _log_note(note: Note) -> None:
    who = {"env": note.env} | ({"server": note.server} if note.server else {})
    level = logging.getLevelNamesMapping()[note.level.upper()]
    log.log(level, "%s: %s", note.env, note.text, extra={**who, **note.facts})


def _now() -> float:
    return time.monotonic()
