"""What a controller tells of itself and its servers: its heartbeat, and lines of their logs. Changes nothing."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from importlib import metadata

from envbus.bus.control_messages import ControllerBeat, EnvReport, LogLines, LogsRequest, ProcessReport
from envbus.controller.managed_env import ManagedEnv
from envbus.controller.processes import Processes
from envbus.errors import BadRequestError
from envbus.server.log_lines import answer_logs

BEAT_S = 1.0


class Reports:
    """Of one controller.

    Args:
        envs: What it runs, by name; the controller goes on to change it.
        processes: Its server processes.
    """

    def __init__(self, controller_id: str, envs: Mapping[str, ManagedEnv], processes: Processes) -> None:
        self._controller_id = controller_id
        self._envs = envs
        self._processes = processes
        self.started_at = time.time()
        """Seconds since the epoch."""

    def beat(self) -> ControllerBeat:
        """What it runs, as it is told once a second."""
        return ControllerBeat(
            controller=self._controller_id,
            host=platform.node(),
            pid=os.getpid(),
            version=metadata.version("envbus"),
            started_at=self.started_at,
            envs=[_env_report(env) for env in self._envs.values() if env.is_wanted],
            processes=[report for env in self._envs.values() for report in self._process_reports(env)],
            interval_s=BEAT_S,
        )

    async def read_log(self, request: LogsRequest, *, max_payload: int) -> LogLines:
        """Lines of the log of one of the servers, running or not long ended.

        Raises:
            BadRequestError: There is no such server, or its log cannot be read.
        """
        server, log_file = self._find_log(request.server)
        return await answer_logs(request, server=server, log_file=log_file, max_payload=max_payload)

    def _process_reports(self, env: ManagedEnv) -> Iterator[ProcessReport]:
        for view in env.supervisor.views():
            record = self._processes.record(view.server)
            yield ProcessReport(
                server=view.server,
                env=env.name,
                slot=view.slot,
                generation=view.generation,
                pid=record.pid if record is not None else None,
                state=view.state,
                restarts=view.restarts,
                last_exit=view.last_exit,
                log_file=self._processes.log_files.get(view.server),
                started_at=record.launched_at if record is not None else None,
            )

    def _find_log(self, prefix: str) -> tuple[str, str]:
        found = [(server, file) for server, file in self._processes.log_files.items() if server.startswith(prefix)]
        if len(found) != 1:
            what = "has no server" if not found else f"has {len(found)} servers"
            raise BadRequestError(f"controller {self._controller_id} {what} with an id that begins with {prefix!r}")
        return found[0]


def _env_report(env: ManagedEnv) -> EnvReport:
    return EnvReport(
        env=env.name,
        env_id=env.spec.id,
        replicas=env.supervisor.replicas,
        autoscale=env.autoscaler is not None,
        failed=env.supervisor.failed,
    )
