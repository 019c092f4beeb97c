"""Which servers and controllers an operator means (pure): by env, host or the start of a server's id."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from envbus.bus.control_messages import MAX_REPLICAS
from envbus.controller.fleet_views import PRESENT, ControllerView, FleetView, ServerView
from envbus.errors import NoServerError, UsageError

SHORT_ID = 8
"""Digits of an id that are shown."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a name stands for."""

    kind: Literal["env", "host", "server"]
    name: str
    """The env's or host's name, or the server's full id."""
    servers: tuple[ServerView, ...]


def find_target(view: FleetView, text: str) -> Target:
    """Return what an operator means. An env's name goes before a host's, and that before a server's id.

    Raises:
        NoServerError: There is nothing of that name.
        UsageError: The start of an id, or an env id, that several have.
    """
    env = find_env(view, text)
    if env is not None:
        return Target("env", env, tuple(server for server in _present(view) if server.env == env))
    hosts = {server.host for server in _present(view)} | {each.host for each in view.controllers if each.state == "up"}
    if text in hosts:
        return Target("host", text, tuple(server for server in _present(view) if server.host == text))
    server = find_server(view, text, servers=_present(view))
    if server is not None:
        return Target("server", server.server, (server,))
    raise NoServerError(_nothing(view, text, hosts))


def find_env(view: FleetView, text: str) -> str | None:
    """Return the name of the env: itself, or the one whose env_id it is.

    Raises:
        UsageError: Several envs have this env_id.
    """
    if view.env(text) is not None:
        return text
    names = [env.env for env in view.envs if text in env.env_ids]
    if len(names) > 1:
        raise UsageError(f"{text!r} is served with different arguments; name one of: {', '.join(names)}")
    return names[0] if names else None


def require_env(view: FleetView, text: str) -> str:
    """Like find_env().

    Raises:
        NoServerError: There is no such env.
    """
    env = find_env(view, text)
    if env is None:
        raise NoServerError(_nothing(view, text, set()))
    return env


def find_server(view: FleetView, text: str, *, servers: Iterable[ServerView] | None = None) -> ServerView | None:
    """Return the server whose id starts so.

    Raises:
        UsageError: Several do.
    """
    found = [server for server in (view.servers if servers is None else servers) if server.server.startswith(text)]
    if text and len(found) > 1:
        raise UsageError(f"{text!r} is the start of {len(found)} server ids: {_listed(found)}; give more digits")
    return found[0] if text and found else None


def one_server(view: FleetView, text: str) -> ServerView | None:
    """Return the one server that an id or an env names; of an env with several it is the one that failed.

    Servers that have ended count too.

    Raises:
        UsageError: Several servers fit.
    """
    env = find_env(view, text)
    if env is None:
        return find_server(view, text)
    servers = view.servers_of(env)
    failed = [server for server in servers if server.state == "failed"]
    if len(failed) == 1:
        return failed[0]
    if len(servers) > 1:
        raise UsageError(f"env {env!r} has {len(servers)} servers; name one by its id: {_listed(servers)}")
    return servers[0] if servers else None


def controllers_of(view: FleetView, env: str, *, host: str | None = None) -> list[ControllerView]:
    """Return the controllers that run the env.

    Raises:
        NoServerError: None does, or none on that host.
    """
    up = [each for each in view.controllers if each.state != "gone"]
    running = [each for each in up if env in each.wants]
    if not running:
        raise NoServerError(
            f"no controller runs env {env!r}: start it with envbus up; servers that were started by envbus serve are "
            "scaled by starting and draining them"
        )
    here = [each for each in running if host is None or each.host == host]
    if not here:
        there = ", ".join(sorted({each.host for each in running}))
        raise NoServerError(f"no controller on host {host!r} runs env {env!r}; the hosts that do: {there}")
    return here


def runs_of(view: FleetView, target: Target) -> list[tuple[ControllerView, str]]:
    """Return which controllers run which envs of a target that is an env or a host.

    Raises:
        UsageError: One of them decides itself how many servers it runs.
    """
    runs = [
        (each, env)
        for each in view.controllers
        for env, wanted in each.wants.items()
        if wanted and each.state != "gone" and target.name == (env if target.kind == "env" else each.host)
    ]
    for each, env in runs:
        if env in each.autoscaled:
            raise UsageError(
                f"env {env!r} scales itself on controller {each.controller}: lower its autoscale limits there, "
                f"or stop the controller with: envbus stop {each.host}"
            )
    return runs


def spread(total: int, current: Mapping[str, int]) -> dict[str, int]:
    """Share a number of servers out among controllers: evenly, and what is left over to those that have most now.

    Raises:
        UsageError: One would get more than a controller may run.
    """
    each, left_over = divmod(total, len(current))
    if each + (left_over > 0) > MAX_REPLICAS:
        raise UsageError(f"one controller runs at most {MAX_REPLICAS} servers of an env; {total} need more controllers")
    order = sorted(current, key=lambda controller: (-current[controller], controller))
    return {controller: each + (rank < left_over) for rank, controller in enumerate(order)}


def _present(view: FleetView) -> list[ServerView]:
    return [server for server in view.servers if server.state in PRESENT]


def _listed(servers: Iterable[ServerView]) -> str:
    return ", ".join(f"{server.server[: SHORT_ID + 4]} ({server.state} on {server.host or '?'})" for server in servers)


def _nothing(view: FleetView, text: str, hosts: set[str]) -> str:
    envs = [env.env for env in view.envs]
    if not envs and not hosts:
        return f"{text!r}: no server and no controller is on the bus; check the address and --prefix"
    close = difflib.get_close_matches(text, [*envs, *hosts], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    also = f"; hosts: {', '.join(sorted(hosts))}" if hosts else ""
    return f"nothing here is called {text!r}; envs: {', '.join(envs) or 'none'}{also}{hint}"
