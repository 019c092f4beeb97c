"""What a fleet looks like at one moment: frozen records that tables, JSON and metrics are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ServerState = Literal["loading", "ready", "full", "lagging", "suspect", "draining", "gone", "failed"]
"""Of these, ready, full and lagging take part in the work; suspect may."""
ControllerState = Literal["up", "suspect", "gone"]
WORKING: frozenset[str] = frozenset({"ready", "full", "lagging", "suspect"})
PRESENT: frozenset[str] = WORKING | {"loading", "draining"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server: what it says of itself, what its controller says, and how long it has been silent."""

    server: str
    env: str
    state: ServerState
    env_id: str = ""
    host: str = ""
    pid: int | None = None
    problem: str | None = None
    """Why it is failed, gone or suspect, as far as anybody said."""
    slots: int = 0
    in_flight: int = 0
    waiting_clients: int = 0
    waiting_jobs: int = 0
    held_results: int = 0
    held_bytes: int = 0
    short_of_memory: bool = False
    """It takes no jobs until results are collected or inputs are done with; its state is then full."""
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    failed_by_type: Mapping[str, int] = field(default_factory=dict)
    rate_per_s: float | None = None
    """Rollouts that ended per second; None until two heartbeats were heard."""
    lag_s: float = 0.0
    oldest_job_s: float = 0.0
    rss_bytes: int = 0
    age_s: float | None = None
    silent_s: float | None = None
    """Since its last heartbeat; None if none was heard."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of the viewer's, the message's way included."""
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    controller: str | None = None
    place: int | None = None
    """Its number among the env's servers on its controller."""
    generation: int | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over servers that are there."""

    servers: int = 0
    slots: int = 0
    in_flight: int = 0
    waiting_clients: int = 0
    waiting_jobs: int = 0
    rate_per_s: float = 0.0
    done: int = 0
    failed: int = 0
    oldest_job_s: float = 0.0
    lag_s: float = 0.0
    """Of the slowest."""

    @property
    def utilisation(self) -> float:
        """Share of the slots that are in use."""
        return self.in_flight / self.slots if self.slots else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvView:
    """One env over all its servers and controllers."""

    env: str
    totals: Totals
    states: Mapping[str, int]
    """How many servers are in each state; gone ones included for a while."""
    env_ids: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    wanted: int | None = None
    """Servers that the controllers want; None if no controller runs it."""
    autoscale: bool = False
    failed_by_type: Mapping[str, int] = field(default_factory=dict)
    waiting_by_client: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Package → its versions on the servers."""
    fingerprints: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    """What its servers do not agree on: ``fingerprint`` and packages."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerView:
    """One controller."""

    controller: str
    host: str
    state: ControllerState
    pid: int
    version: str
    started_at: float
    """Seconds since the epoch by its host's clock."""
    silent_s: float
    wants: Mapping[str, int]
    """Env → replicas."""
    autoscaled: tuple[str, ...] = ()
    """Envs whose replicas it decides itself."""
    processes: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Everything, sorted by name."""

    totals: Totals
    envs: tuple[EnvView, ...] = ()
    servers: tuple[ServerView, ...] = ()
    controllers: tuple[ControllerView, ...] = ()
    cut_off: bool = False
    """The viewer hears nothing now; what it shows is as of then."""

    def env(self, name: str) -> EnvView | None:
        """The env of this name."""
        return next((env for env in self.envs if env.env == name), None)

    def servers_of(self, env: str) -> list[ServerView]:
        """The env's servers."""
        return [server for server in self.servers if server.env == env]

    def server(self, server_id: str) -> ServerView | None:
        """The server of this id."""
        return next((server for server in self.servers if server.server == server_id), None)

    def as_json(self) -> dict[str, Any]:
        """Plain maps and lists."""
        return asdict(self)
