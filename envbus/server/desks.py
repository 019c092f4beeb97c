"""Everything of one server that answers on the bus, opened and closed together. Runs on the bus thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbus.bus.connection import Connection
from envbus.bus.subjects import Subjects
from envbus.bus.tasks import TaskSet
from envbus.bus.thread import Crossing
from envbus.server.beats import Beats, LoopLag
from envbus.server.catalogue import Catalogue
from envbus.server.control import ControlDesk
from envbus.server.identity import Identity
from envbus.server.microservice import MicroService
from envbus.server.reception import Reception, RunnerPort
from envbus.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class DeskOptions:
    """What a server's desks need to know.

    Attributes:
        log_file: Whose lines are given to operators.
        controller: Id of the controller that launched the server.
    """

    identity: Identity
    settings: ServerSettings
    max_concurrent: int
    log_file: str | Path | None
    controller: str | None


class Desks:
    """The desks of one server.

    Args:
        runner: Where admitted jobs run.
        env_loop: Crossing to the env's loop, whose lag is measured.
        bus_loop: Crossing to this loop.
        stop: Called with an operator's order, ``drain`` or ``stop``.
    """

    def __init__(
        self,
        connection: Connection,
        subjects: Subjects,
        options: DeskOptions,
        *,
        runner: RunnerPort,
        env_loop: Crossing,
        bus_loop: Crossing,
        stop: Callable[[str], None],
    ) -> None:
        identity, settings = options.identity, options.settings
        self._server_id = identity.server_id
        self._connection = connection
        self._subjects = subjects
        self._tasks = TaskSet("the server's desks")
        self.reception = Reception(
            connection,
            subjects,
            server_id=identity.server_id,
            settings=settings,
            capacity=options.max_concurrent,
            fingerprint=identity.fingerprint,
            runner=runner,
        )
        self.beats = Beats(
            connection,
            subjects,
            self.reception,
            identity=identity,
            lag=LoopLag(env_loop, bus_loop).measure,
            interval_s=settings.beat_interval_s,
            controller=options.controller,
        )
        self.catalogue = Catalogue(connection, subjects, self.reception, identity=identity, settings=settings)
        self._control = ControlDesk(connection, subjects, self.reception, stop=stop, log_file=options.log_file)
        self._service = MicroService(
            connection, subjects, self.reception, self.catalogue, identity=identity, beat=self.beats.now
        )

    async def open(self) -> None:
        """Be reachable, though still loading."""
        await self.reception.open()
        await self.catalogue.open()
        await self._control.open(self._server_id)
        await self._service.open()
        self._tasks.spawn(self.beats.run())

    async def check_allowed(self) -> None:
        """Wait until NATS has judged all that a server needs.

        Raises:
            BusPermissionError: It denied some of it to this user.
        """
        subjects, server = self._subjects, self._server_id
        await self.reception.try_queue()
        await self.beats.send()
        await self._connection.check_allowed(
            *(subjects.rollout, subjects.info, subjects.examples, subjects.wait, subjects.server(server)),
            *(subjects.ctl(server), subjects.ctl_all),
            published=[subjects.beat(server)],
        )

    async def ready(self) -> None:
        """Take jobs, and say so at once."""
        await self.reception.ready()
        await self.beats.send()

    async def load_failed(self, reason: str) -> None:
        """Say why the environment could not be loaded."""
        self.beats.error = reason
        await self.beats.send()

    async def drain(self) -> None:
        """Take no more jobs."""
        self.reception.drain()

    async def stop_running(self) -> None:
        """End every job that still runs."""
        self.reception.stop_running()

    async def close(self) -> None:
        """Answer no more."""
        await self._tasks.close()
        await self._service.close()
        await self._control.close()
        await self.catalogue.close()
        await self.reception.close()
