"""The fleet as its heartbeats tell it (pure): beats and a clock value in, a FleetView out.

Silence makes a server suspect, then gone; what its controller or a Gone message says
counts at once. While the viewer itself is cut off, its clocks for all others stand still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from envbus.bus.control_messages import ControllerBeat, ProcessReport
from envbus.bus.messages import Beat, Gone
from envbus.controller.env_totals import env_view, sum_totals
from envbus.controller.fleet_views import (
    PRESENT,
    WORKING,
    ControllerState,
    ControllerView,
    EnvView,
    FleetView,
    ServerState,
    ServerView,
)
from envbus.controller.sane_beats import sane_beat

RATE_WINDOW_S = 5.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 60.0
_PROCESS_STATES: dict[str, ServerState] = {
    "starting": "loading",
    "running": "loading",
    "suspect": "suspect",
    "stuck": "suspect",
    "draining": "draining",
    "backoff": "failed",
    "failed": "failed",
    "ended": "gone",
}


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """When silence and lag mean something."""

    suspect_beats: float = 3.0
    """Beat intervals without a beat after which a server or controller is suspect."""
    gone_s: float = 30.0
    """Silence after which it is taken for gone; never less than twice the time until suspect."""
    lag_s: float = 1.0
    """An env's loop that answers this late is lagging."""
    forget_s: float = 30.0
    """How long one that is gone is still shown."""
    return_s: float = 5.0
    """After an outage the others may need this long to be back too; their clocks stand still until then."""


@dataclass(slots=True)
class _Heard:
    """A server that beats."""

    beat: Beat
    heard_at: float
    counts: deque[tuple[float, int]] = field(default_factory=deque)
    clock_ahead_s: float | None = None
    gone_at: float | None = None
    gone_reason: str = ""


class Fleet:
    """Collects beats; all clock values are of one monotonic clock, in seconds."""

    def __init__(self, limits: FleetLimits | None = None) -> None:
        self._limits = limits or FleetLimits()
        self._servers: dict[str, _Heard] = {}
        self._controllers: dict[str, tuple[ControllerBeat, float]] = {}
        self._stood_s = 0.0
        self._cut_off_at: float | None = None
        self._moving_from = float("-inf")

    # ---- in

    def server_beat(self, beat: Beat, now: float, *, wall: float | None = None) -> None:
        """A server has beaten.

        Args:
            beat: Its numbers are brought within reason: they are a stranger's word.
            now: When it came.
            wall: Seconds since the epoch here, to compare clocks.
        """
        clock, beat = self._clock(now), sane_beat(beat)
        known = self._servers.get(beat.server)
        if known is None or known.beat.started_at != beat.started_at:
            known = self._servers[beat.server] = _Heard(beat, clock)
        elif known.gone_at is not None:
            if clock - known.gone_at <= 2 * _interval_s(beat.interval_s):
                return  # a last beat that the news of its end has overtaken
            known.gone_at = None
        known.beat, known.heard_at = beat, clock
        if wall is not None and beat.sent_at is not None:
            known.clock_ahead_s = beat.sent_at - wall
        _count(known.counts, beat.sent_at if beat.sent_at is not None else clock, beat.done + beat.failed)

    def controller_beat(self, beat: ControllerBeat, now: float) -> None:
        """A controller has beaten."""
        clock = self._clock(now)
        self._controllers[beat.controller] = beat, clock
        for process in beat.processes:
            if process.state in ("ended", "backoff", "failed"):
                self._end(process.server, process.last_exit or "", clock)

    def gone(self, message: Gone, now: float, *, env: str) -> None:
        """A controller saw the end of a server's process; it may speak for the env of its subject only."""
        heard = self._servers.get(message.server)
        if heard is not None and heard.beat.env == env:
            self._end(message.server, message.reason, self._clock(now))

    def server_gone(self, server_id: str, now: float, *, reason: str = "") -> None:
        """NATS says that nobody answers for a server any more."""
        self._end(server_id, reason, self._clock(now))

    def cut_off(self, now: float) -> None:
        """The viewer hears nothing from now on."""
        if self._cut_off_at is None:
            clock = self._clock(now)
            self._cut_off_at = now
            self._stood_s = now - clock

    def back(self, now: float) -> None:
        """The viewer hears again."""
        if self._cut_off_at is not None:
            self._stood_s += now + self._limits.return_s - self._cut_off_at
            self._moving_from = now + self._limits.return_s
            self._cut_off_at = None

    def forget(self, now: float) -> None:
        """Drop what is over for long."""
        clock, limits = self._clock(now), self._limits
        for server_id, heard in list(self._servers.items()):
            silent_s = clock - heard.heard_at
            since_end_s = clock - heard.gone_at if heard.gone_at is not None else silent_s - self._gone_s(heard.beat)
            if heard.beat.state == "failed":
                since_end_s = silent_s
            if since_end_s > limits.forget_s:
                del self._servers[server_id]
        for controller_id, (beat, heard_at) in list(self._controllers.items()):
            if clock - heard_at > self._gone_s(beat) + limits.forget_s:
                del self._controllers[controller_id]

    # ---- out

    def view(self, now: float) -> FleetView:
        """The fleet as it is known at this time."""
        self.forget(now)
        clock = self._clock(now)
        reports = dict(self._reports(clock))
        servers = [self._heard_view(heard, reports.get(server_id), clock) for server_id, heard in self._servers.items()]
        servers += [
            _reported_view(report, beat)
            for server_id, (report, beat) in reports.items()
            if server_id not in self._servers
        ]
        servers.sort(key=lambda server: (server.env, server.host, server.place or 0, server.server))
        names = {server.env for server in servers}
        names |= {env.env for beat, heard_at in self._live_controllers(clock) for env in beat.envs}
        envs = tuple(self._env_view(name, servers, clock) for name in sorted(names))
        return FleetView(
            totals=sum_totals(env.totals for env in envs),
            envs=envs,
            servers=tuple(servers),
            controllers=tuple(self._controller_views(clock)),
            cut_off=self._cut_off_at is not None,
        )

    # ---- parts

    def _clock(self, now: float) -> float:
        if self._cut_off_at is not None:
            now = self._cut_off_at
        elif now < self._moving_from:
            now = self._moving_from
        return now - self._stood_s

    def _end(self, server_id: str, reason: str, clock: float) -> None:
        heard = self._servers.get(server_id)
        if heard is not None and heard.gone_at is None:
            heard.gone_at, heard.gone_reason = clock, reason

    def _suspect_s(self, beat: Beat | ControllerBeat) -> float:
        return self._limits.suspect_beats * _interval_s(beat.interval_s)

    def _gone_s(self, beat: Beat | ControllerBeat) -> float:
        return max(self._limits.gone_s, 2 * self._suspect_s(beat))

    def _live_controllers(self, clock: float) -> Iterator[tuple[ControllerBeat, float]]:
        for beat, heard_at in self._controllers.values():
            if clock - heard_at <= self._gone_s(beat):
                yield beat, heard_at

    def _reports(self, clock: float) -> Iterator[tuple[str, tuple[ProcessReport, ControllerBeat]]]:
        for beat, _ in self._live_controllers(clock):
            for process in beat.processes:
                yield process.server, (process, beat)

    def _state(self, heard: _Heard, report: ProcessReport | None, clock: float) -> tuple[ServerState, str | None]:
        beat, silent_s = heard.beat, clock - heard.heard_at
        crashed = report is not None and report.state in ("backoff", "failed")
        if beat.state == "failed" or (heard.gone_at is not None and crashed):
            return "failed", beat.error or heard.gone_reason or None
        if heard.gone_at is not None:
            return "gone", heard.gone_reason or None
        leaving = beat.state in ("draining", "stopping")
        if silent_s > (self._suspect_s(beat) if leaving else self._gone_s(beat)):
            return "gone", None
        if leaving:
            return "draining", None
        if silent_s > self._suspect_s(beat):
            return "suspect", f"silent for {silent_s:.0f} s"
        if report is not None and report.state in ("suspect", "stuck"):
            return "suspect", f"its controller says: {report.state}"
        if beat.state == "loading":
            return "loading", None
        return ("lagging" if beat.loop_lag_s >= self._limits.lag_s else _ready_or_full(beat)), None

    def _heard_view(
        self, heard: _Heard, reported: tuple[ProcessReport, ControllerBeat] | None, clock: float
    ) -> ServerView:
        beat = heard.beat
        report = reported[0] if reported else None
        state, problem = self._state(heard, report, clock)
        working = state in WORKING
        return ServerView(
            server=beat.server,
            env=beat.env,
            state=state,
            env_id=beat.env_id,
            host=beat.host,
            pid=beat.pid,
            problem=problem,
            slots=beat.slots,
            in_flight=beat.in_flight if state in PRESENT else 0,
            waiting_clients=beat.waiting_clients if working else 0,
            waiting_jobs=beat.waiting_jobs if working else 0,
            held_results=beat.held_results,
            held_bytes=beat.held_bytes,
            short_of_memory=beat.short_of_memory,
            done=beat.done,
            failed=beat.failed,
            cancelled=beat.cancelled,
            failed_by_type=beat.failed_by_type,
            rate_per_s=_rate(heard.counts) if state in PRESENT - {"suspect"} else None,
            lag_s=beat.loop_lag_s,
            oldest_job_s=beat.oldest_job_s if state in PRESENT else 0.0,
            rss_bytes=beat.rss_bytes,
            age_s=None if beat.sent_at is None else max(0.0, beat.sent_at - beat.started_at),
            silent_s=max(0.0, clock - heard.heard_at),
            clock_ahead_s=heard.clock_ahead_s,
            versions=beat.versions,
            fingerprint=beat.fingerprint,
            controller=beat.controller or (reported[1].controller if reported else None),
            place=report.slot if report else None,
            generation=report.generation if report else None,
            restarts=report.restarts if report else 0,
        )

    def _env_view(self, name: str, servers: list[ServerView], clock: float) -> EnvView:
        mine = [server for server in servers if server.env == name]
        reports = [env for beat, _ in self._live_controllers(clock) for env in beat.envs if env.env == name]
        waiting = [
            self._servers[server.server].beat.waiting_by_client
            for server in mine
            if server.state in PRESENT and server.server in self._servers
        ]
        return env_view(name, mine, waiting=waiting, reports=reports)

    def _controller_views(self, clock: float) -> Iterator[ControllerView]:
        for beat, heard_at in sorted(self._controllers.values(), key=lambda item: (item[0].host, item[0].controller)):
            silent_s = max(0.0, clock - heard_at)
            state: ControllerState = "up" if silent_s <= self._suspect_s(beat) else "suspect"
            yield ControllerView(
                controller=beat.controller,
                host=beat.host,
                state="gone" if silent_s > self._gone_s(beat) else state,
                pid=beat.pid,
                version=beat.version,
                started_at=beat.started_at,
                silent_s=silent_s,
                wants={env.env: max(0, env.replicas) for env in beat.envs},
                autoscaled=tuple(env.env for env in beat.envs if env.autoscale),
                processes=sum(process.pid is not None for process in beat.processes),
                restarts=sum(process.restarts for process in beat.processes),
            )


def _interval_s(claimed_s: float) -> float:
    """A beat interval within reason: it is a stranger's word."""
    return claimed_s if _MIN_INTERVAL_S <= claimed_s <= _MAX_INTERVAL_S else 1.0


def _ready_or_full(beat: Beat) -> ServerState:
    return "full" if beat.state == "full" else "ready"


def _count(counts: deque[tuple[float, int]], stamp: float, count: int) -> None:
    if counts and (stamp < counts[-1][0] or count < counts[-1][1]):
        counts.clear()  # a clock that was set, or a server that counts anew
    counts.append((stamp, count))
    while stamp - counts[0][0] > RATE_WINDOW_S and len(counts) > 2:
        counts.popleft()


def _rate(counts: deque[tuple[float, int]]) -> float | None:
    if len(counts) < 2 or counts[-1][0] <= counts[0][0]:
        return None
    return (counts[-1][1] - counts[0][1]) / (counts[-1][0] - counts[0][0])


def _reported_view(report: ProcessReport, beat: ControllerBeat) -> ServerView:
    """A server that only its controller speaks of."""
    state = _PROCESS_STATES[report.state]
    problem = report.last_exit if state in ("failed", "gone") or report.restarts else None
    if report.state == "backoff":
        problem = f"will be started again; it ended with {report.last_exit or 'an unknown exit'}"
    return ServerView(
        server=report.server,
        env=report.env,
        state=state,
        host=beat.host,
        pid=report.pid,
        problem=problem,
        controller=beat.controller,
        place=report.slot,
        generation=report.generation,
        restarts=report.restarts,
    )
