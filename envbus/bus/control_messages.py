"""The wire messages between operators and controllers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from envbus.bus.messages import Count, Id, Int, WireMessage

MAX_REPLICAS = 1_000
"""Servers of one env on one controller."""


class ProcessReport(BaseModel):
    """One server process as its controller sees it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    server: Id
    env: str
    slot: Int
    """Its place among the env's replicas on this controller, from 0."""
    generation: Int
    """Raised by every rolling restart."""
    pid: Int | None
    state: Literal["starting", "running", "suspect", "stuck", "draining", "backoff", "failed", "ended"]
    restarts: Int = 0
    last_exit: str | None = None
    """Exit code or signal name of the last process in this place, and its last log lines."""
    log_file: str | None = None
    started_at: float | None = None
    """Seconds since the epoch."""


class EnvReport(BaseModel):
    """One env as its controller wants it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    env: str
    env_id: str
    replicas: Int
    """Wanted on this controller."""
    autoscale: bool = False
    failed: str | None = None
    """Why this controller has given the env up, if it has."""


class ControllerBeat(WireMessage):
    """A controller's heartbeat, once a second, and its answer to a status request."""

    kind = "controller_beat"
    controller: Id
    host: str
    pid: Int
    version: str
    started_at: float
    """Seconds since the epoch."""
    envs: Annotated[list[EnvReport], FailFast()] = Field(default_factory=list)
    processes: Annotated[list[ProcessReport], FailFast()] = Field(default_factory=list)
    interval_s: float = 1.0


class StatusRequest(WireMessage):
    """Answer with a ControllerBeat."""

    kind = "status_request"


class Scale(WireMessage):
    """Run this many servers of the env on this controller."""

    kind = "scale"
    env: str
    replicas: int = Field(ge=0, le=MAX_REPLICAS)


class Restart(WireMessage):
    """Replace the env's servers one by one, each new one ready before an old one drains."""

    kind = "restart"
    env: str


class StopController(WireMessage):
    """Drain all servers of this controller and end it."""

    kind = "stop_controller"


class LogsRequest(WireMessage):
    """Send lines of a server's log: the last ones, or those after an offset. A server answers it too, on its ctl."""

    kind = "logs_request"
    server: str
    """Server id, or any prefix of it that is unique."""
    lines: int = Field(100, ge=1, le=5_000)
    after: Count | None = None
    """Byte offset to go on from; None: the last ``lines``."""


class LogLines(WireMessage):
    """Lines of a log."""

    kind = "log_lines"
    server: str
    lines: Annotated[list[str], FailFast()]
    next: Int
    """Offset to ask for what comes after these."""
