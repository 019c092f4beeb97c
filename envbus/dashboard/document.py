"""What the page is sent (pure): a fleet and its history as plain JSON values, cut to what a page can show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

from envbus.controller.fleet_views import EnvView, FleetView, ServerView
from envbus.dashboard.history import WINDOW_S, History, Point, Seen

MAX_ENVS = 100
MAX_SERVERS = 300
MAX_CLIENTS = 8
MAX_FAILURES = 8
SHOWN_RECENT = 14
_MAX_TEXT = 300


def document(view: FleetView, history: History, *, at: float, points: Iterable[Point]) -> dict[str, Any]:
    """Return the page's data.

    Args:
        view: The fleet now.
        history: Of the last minutes.
        at: Seconds since the epoch.
        points: Of the curves: all of them for a page that has just come, else those since the last time.
    """
    done, failed = history.ended()
    totals = view.totals
    clients = _clients(view)
    return {
        "at": at,
        "cut_off": view.cut_off,
        "window_s": WINDOW_S,
        "totals": {
            "states": _states(view),
            "slots": totals.slots,
            "in_flight": totals.in_flight,
            "waiting_jobs": totals.waiting_jobs,
            "waiting_clients": totals.waiting_clients,
            "done": done,
            "failed": failed,
        },
        "envs": [_env(env, history) for env in view.envs[:MAX_ENVS]],
        "servers": [_server(server) for server in view.servers[:MAX_SERVERS]],
        "more_servers": max(0, len(view.servers) - MAX_SERVERS),
        "clients": clients[:MAX_CLIENTS],
        "more_clients": max(0, totals.waiting_clients - len(clients[:MAX_CLIENTS])),
        "failures": _failures(history),
        "recent": [_seen(seen) for seen in list(history.recent)[: -SHOWN_RECENT - 1 : -1]],
        "points": [astuple(point) for point in points],
    }


def encoded(data: dict[str, Any]) -> str:
    """Return the data as JSON in one line that any browser reads."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _states(view: FleetView) -> dict[str, int]:
    states: dict[str, int] = {}
    for server in view.servers:
        states[server.state] = states.get(server.state, 0) + 1
    return states


def _env(env: EnvView, history: History) -> dict[str, Any]:
    totals = env.totals
    return {
        "env": env.env,
        "wanted": env.wanted,
        "slots": totals.slots,
        "in_flight": totals.in_flight,
        "waiting_jobs": totals.waiting_jobs,
        "rate": _number(totals.rate_per_s),
        "rates": history.rates(env),
        "failed": history.failed_of(env),
        "reward": _number(history.reward(env)),
        "mixed": list(env.mixed),
        "problem": _short(env.problems[0]) if env.problems else None,
    }


def _server(server: ServerView) -> dict[str, Any]:
    return {
        "server": server.server,
        "env": server.env,
        "host": server.host,
        "state": server.state,
        "problem": _short(server.problem) if server.problem else None,
        "slots": server.slots,
        "in_flight": server.in_flight,
        "rate": _number(server.rate_per_s),
        "lag_s": _number(server.lag_s),
        "age_s": _number(server.age_s),
        "silent_s": _number(server.silent_s),
        "rss_bytes": server.rss_bytes,
        "failed": server.failed,
    }


def _clients(view: FleetView) -> list[dict[str, Any]]:
    waiting = [(jobs, client, env.env) for env in view.envs for client, jobs in env.waiting_by_client.items()]
    waiting.sort(key=lambda item: (-item[0], item[1]))
    return [{"client": client, "env": env, "jobs": jobs} for jobs, client, env in waiting]


def _failures(history: History) -> list[dict[str, Any]]:
    most = history.failures().most_common(MAX_FAILURES)
    return [{"env": env, "type": kind, "count": count} for (env, kind), count in most]


def _seen(seen: Seen) -> dict[str, Any]:
    rollout = seen.rollout
    return {
        "number": seen.number,
        "at": seen.at,
        "env": seen.env,
        "server": seen.server,
        "example_id": rollout.example_id,
        "reward": _number(rollout.reward),
        "error": rollout.error,
        "duration_s": _number(rollout.duration_s),
        "client": rollout.client,
    }


def _number(value: float | None) -> float | None:
    """Strangers' numbers: NaN and infinities are no JSON."""
    return round(value, 4) if value is not None and math.isfinite(value) else None


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"
