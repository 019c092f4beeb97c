"""A check-up of a bus and the fleet on it: findings, each with what to change. Asks, and changes nothing."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from envbus.bus.connection import Connection
from envbus.bus.messages import PROTOCOL_VERSION
from envbus.bus.subjects import all_beats
from envbus.controller.fleet_views import PRESENT, FleetView, ServerView
from envbus.controller.operator import Operator
from envbus.controller.permission_probes import BARRIER_S, ROLES, Need, Role, is_allowed, needs
from envbus.settings import KIB, MIB

Level = Literal["ok", "note", "warning", "failed"]
MADE_UP_ENV = "doctor"
"""Whose subjects are tried when no env is on the bus."""
SKEW_S = 2.0
"""Clocks may differ by so much: deadlines cross hosts as absolute times."""
SLOW_S = 0.25
MIN_PAYLOAD_BYTES = 64 * KIB
_OF_ONE_CONTROLLER = "; if this user is one controller's: --controller-id ID tries it with that id"
_TRIPS = 5
_MAX_PINGED = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    found: str
    advice: str = ""


async def diagnose(
    operator: Operator, *, env: str | None, roles: Sequence[Role], controller_id: str | None = None
) -> AsyncIterator[Finding]:
    """Check everything; each finding as soon as it is there.

    Args:
        operator: Connected.
        env: Whose subjects are tried; None: those of the first env on the bus.
        roles: That this user must be able to play; empty: any one of them.
        controller_id: Of the controller that this user may be limited to.
    """
    yield Finding("connection", "ok", f"NATS at {operator.options.describe()}")
    yield await _latency(operator)
    yield _payload(await operator.on_bus(_max_payload))
    view = await operator.survey()
    tried = env or next((each.env for each in view.envs), MADE_UP_ENV)
    async for finding in _permissions(operator, tried, roles, controller_id):
        yield finding
    yield _population(operator, view, heard=await operator.on_bus(lambda bus: _hears_servers(bus, operator.prefix)))
    present = [server for server in view.servers if server.state in PRESENT]
    for finding in [*_clocks(present), *_versions(view, present), *_troubles(view)]:
        yield finding
    if present:
        yield await _pings(operator, present)


async def _hears_servers(connection: Connection, prefix: str) -> bool:
    return connection.denied("subscribe", all_beats(prefix)) is None


async def _max_payload(connection: Connection) -> int:
    return connection.max_payload


async def _latency(operator: Operator) -> Finding:
    try:
        trips = [await operator.on_bus(lambda bus: bus.round_trip(timeout_s=BARRIER_S)) for _ in range(_TRIPS)]
    except TimeoutError:
        return Finding("round trip to NATS", "failed", "no answer", "check the network between here and NATS")
    median_s = statistics.median(trips)
    found = f"median {median_s * 1000:.1f} ms, most {max(trips) * 1000:.1f} ms"
    if median_s > SLOW_S:
        return Finding("round trip to NATS", "warning", found, "put NATS nearer: each rollout needs a few round trips")
    return Finding("round trip to NATS", "ok", found)


def _payload(limit: int) -> Finding:
    found = f"{limit:,} bytes"
    if limit < MIN_PAYLOAD_BYTES:
        return Finding("max_payload", "failed", found, "set max_payload: 1MB in the configuration of nats-server")
    if limit < MIB:
        return Finding("max_payload", "warning", found, "large results go in many parts; set max_payload: 1MB")
    return Finding("max_payload", "ok", found)


async def _permissions(
    operator: Operator, env: str, roles: Sequence[Role], controller_id: str | None
) -> AsyncIterator[Finding]:
    rights = list(needs(env, operator.prefix, controller_id=controller_id))
    able = False
    for role in ROLES:
        denied = [
            need
            for need in rights
            if need.role == role and not await operator.on_bus(lambda bus, need=need: is_allowed(bus, need))  # type: ignore[misc]
        ]
        missing = [need for need in denied if not need.without]
        able = able or not missing
        of_any_id = role == "controller" and controller_id is None
        yield _role_finding(role, missing, denied, wanted=role in roles, of_any_id=of_any_id)
    if not able and not roles:
        yield Finding("permissions", "failed", "this user can play no role", "grant the subjects named above")


def _role_finding(
    role: Role, missing: list[Need], denied: list[Need], *, wanted: bool, of_any_id: bool = False
) -> Finding:
    check = f"permissions as {role}"
    if missing:
        subjects = "; ".join(f"{need.action} {_pattern(need)}" for need in missing)
        advice = f"for this role, grant: {subjects}{_OF_ONE_CONTROLLER if of_any_id else ''}"
        return Finding(check, "failed" if wanted else "note", f"denied: {subjects}", advice if wanted else "")
    if denied:
        subjects = "; ".join(f"{need.action} {_pattern(need)}: {need.without}" for need in denied)
        return Finding(check, "note", f"all that is needed; denied: {subjects}")
    return Finding(check, "ok", "all subjects")


def _pattern(need: Need) -> str:
    """The subject with a wildcard in place of the id that was made up for the probe."""
    head, _, last = need.subject.rpartition(".")
    subject = f"{head}.*" if len(last) == 32 else need.subject
    return f"{subject} in queue group {need.queue}" if need.queue else subject


def _population(operator: Operator, view: FleetView, *, heard: bool) -> Finding:
    if not heard:
        return Finding("fleet", "note", "not seen: this user may not hear all servers")
    if not view.envs and not view.controllers:
        advice = (
            f"none under prefix {operator.prefix!r}: start one with envbus serve, or check --prefix and the account"
        )
        return Finding("fleet", "note", "no servers and no controllers", advice)
    return Finding(
        "fleet",
        "ok",
        f"{view.totals.servers} servers of {len(view.envs)} envs, {len(view.controllers)} controllers",
    )


def _clocks(servers: Sequence[ServerView]) -> list[Finding]:
    known = [server for server in servers if server.clock_ahead_s is not None]
    if not known:
        return []
    off = {server.host: server.clock_ahead_s or 0.0 for server in known if abs(server.clock_ahead_s or 0.0) > SKEW_S}
    if off:
        found = ", ".join(f"{host} by {ahead:+.1f} s" for host, ahead in sorted(off.items()))
        return [Finding("clocks", "failed", f"differ: {found}", "run NTP there and here: requests would come too late")]
    most = max(abs(server.clock_ahead_s or 0.0) for server in known)
    return [Finding("clocks", "ok", f"within {most:.2f} s of this host's")]


def _versions(view: FleetView, servers: Sequence[ServerView]) -> list[Finding]:
    findings = []
    for env in view.envs:
        for what in env.mixed:
            found = env.fingerprints if what == "fingerprint" else env.versions.get(what, ())
            text = f"{env.env}: servers differ in {what}: {', '.join(found)}"
            findings.append(Finding("versions", "warning", text, f"envbus restart {env.env}, or drain the old ones"))
    protocols = {server.versions.get("protocol", str(PROTOCOL_VERSION)) for server in servers}
    if protocols - {str(PROTOCOL_VERSION)}:
        text = f"servers speak protocol {', '.join(sorted(protocols))}, this side {PROTOCOL_VERSION}"
        findings.append(Finding("versions", "failed", text, "upgrade the older side"))
    here = metadata.version("envbus")
    others = {server.versions["envbus"] for server in servers if "envbus" in server.versions} - {here}
    if others:
        text = f"servers run envbus {', '.join(sorted(others))}, this side {here}"
        findings.append(Finding("versions", "note", text, "upgrade one side when convenient"))
    return findings or [Finding("versions", "ok", f"envbus {here}, protocol {PROTOCOL_VERSION}, no mixed env")]


def _troubles(view: FleetView) -> list[Finding]:
    findings = [
        Finding("fleet", "warning", f"{env.env}: {problem}", "see its log: envbus logs")
        for env in view.envs
        for problem in env.problems
    ]
    for server in view.servers:
        if server.state in ("lagging", "suspect"):
            who = f"server {server.server[:8]} of {server.env} on {server.host}"
            text = f"{who} is {server.state}, lag {server.lag_s:.1f} s"
            findings.append(
                Finding("fleet", "warning", text, "its code blocks the event loop, or its host is overloaded")
            )
    return findings


async def _pings(operator: Operator, servers: Sequence[ServerView]) -> Finding:
    answers = await operator.round_trips(servers[:_MAX_PINGED], 1)
    trips = [seconds for answer in answers for seconds in answer.seconds]
    silent = [
        f"{answer.server.server[:8]} of {answer.server.env} on {answer.server.host}"
        for answer in answers
        if answer.error is not None and not answer.denied
    ]
    if silent:
        found = f"no answer from {', '.join(silent)}"
        return Finding("round trip to servers", "failed", found, "they stall, or NATS loses what is sent to them")
    if not trips:
        return Finding("round trip to servers", "note", "not tried: this user may not publish to ctl")
    found = f"median {statistics.median(trips) * 1000:.1f} ms, most {max(trips) * 1000:.1f} ms"
    return Finding("round trip to servers", "ok" if max(trips) < 2 * SLOW_S else "warning", found)
