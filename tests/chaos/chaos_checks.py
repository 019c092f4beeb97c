"""What must hold of a chaos run, judged from its ledgers alone. Pure: facts in, violations out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import envbus.errors

Entry = dict[str, Any]
CHANCY = frozenset({"NoServerError", "ServerLostError", "ServerLoadingError", "LeaseExpiredError"})
"""Errors that a call may end with when faults go beyond the settings; they must be rare."""

NOT_COLLECTED = "not collected within"
"""Why a server that holds results for a short time only may lose one: its client was away for longer."""


@dataclass(frozen=True, slots=True)
class Window:
    """A fault that was carried out: what was not as it should be, and when."""

    label: str
    target: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still fine."""

    max_starts: int
    """Starts of one rollout: the attempts, and copies whose acceptance was lost."""
    orphan_s: float
    """How long an attempt may go on after its call has ended, apart from faults."""
    max_chancy_share: float = 0.1
    more_tasks: int = 6
    more_threads: int = 4
    more_fds: int = 10
    more_rss_bytes: int = 250_000_000


@dataclass(slots=True)
class Record:
    """All that is known of a run.

    Attributes:
        calls: ``begin`` and ``end`` of calls, as the clients wrote them.
        attempts: ``start``, ``end`` and ``cancel`` of rollouts, as the env wrote them.
        killed: Processes that had no chance to write how things ended.
        terminated: Those that were asked to end.
        names: Process id → name of the target that it belongs to.
        vitals: Reports of what processes hold, with ``tag`` base or end.
        roles: Process id → server or client.
        beats: Last heartbeat of each server at the end: name → counts.
        exits: What is wrong with how processes ended.
        left: Command lines of processes that are still there at the very end.
    """

    calls: list[Entry] = field(default_factory=list)
    attempts: list[Entry] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    terminated: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    vitals: list[Entry] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    beats: dict[str, dict[str, int]] = field(default_factory=dict)
    exits: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def violations(record: Record, limits: Limits) -> list[str]:
    """Return what is wrong, one line each."""
    return [
        *_calls_end_once(record),
        *_outcomes_fit(record),
        *_chancy_errors_are_rare(record, limits),
        *_attempts_are_accounted_for(record),
        *_starts_are_bounded(record, limits),
        *_results_have_attempts(record),
        *_no_orphans(record, limits),
        *_servers_are_quiet(record),
        *_nothing_leaks(record, limits),
        *record.exits,
        *(f"left behind: {line}" for line in record.left),
    ]


def hanging(record: Record) -> list[Entry]:
    """Return the begins of calls that have not ended though their process was not killed."""
    ended = {entry["call"] for entry in record.calls if entry["event"] == "end"}
    return [
        entry
        for entry in record.calls
        if entry["event"] == "begin" and entry["call"] not in ended and entry["pid"] not in record.killed
    ]


def _calls_end_once(record: Record) -> Iterator[str]:
    begins = Counter(entry["call"] for entry in record.calls if entry["event"] == "begin")
    ends = Counter(entry["call"] for entry in record.calls if entry["event"] == "end")
    for entry in hanging(record):
        yield f"call {entry['call']} ({entry['kind']}) never ended"
    for call, count in ends.items():
        if count > 1:
            yield f"call {call} ended {count} times"
        if not begins[call]:
            yield f"call {call} ended without having begun"


def _outcomes_fit(record: Record) -> Iterator[str]:
    kinds = {entry["call"]: entry["kind"] for entry in record.calls if entry["event"] == "begin"}
    for entry in record.calls:
        if entry["event"] == "end" and (wrong := _misfit(kinds.get(entry["call"], ""), entry, record)):
            yield f"call {entry['call']} ({kinds.get(entry['call'])}): {wrong}"


def _misfit(kind: str, end: Entry, record: Record) -> str | None:
    outcome = end["outcome"]
    if outcome == "result":
        if kind in ("cancel", "timeout"):
            return "has a result, though its rollout never ends"
        return None if end["right"] else "has the wrong result"
    if outcome == "cancelled":
        return None if kind == "cancel" else "was cancelled, by nobody"
    if outcome == "CallTimeoutError":
        return None if kind == "timeout" else f"has a time limit of its own: {end['error']}"
    if outcome in ("BusClosedError", "UsageError") and end["pid"] in record.terminated:
        return None
    if outcome == "ResultLostError" and NOT_COLLECTED in end["error"]:
        return None
    if outcome in CHANCY or (outcome == "LateRequestError" and _clocks_differed(end["at"], record)):
        return None
    known = getattr(envbus.errors, outcome, None)
    what = "ended with" if known is not None else "ended with an error that is none of envbus:"
    return f"{what} {outcome}: {end['error']}"


def _clocks_differed(at: float, record: Record) -> bool:
    return any(w.label.startswith("clock ") and w.from_s <= at <= w.to_s for w in record.windows)


def _chancy_errors_are_rare(record: Record, limits: Limits) -> Iterator[str]:
    ends = [entry["outcome"] for entry in record.calls if entry["event"] == "end"]
    chancy = sum(outcome in CHANCY | {"LateRequestError", "ResultLostError"} for outcome in ends)
    if chancy > max(3, limits.max_chancy_share * len(ends)):
        yield f"{chancy} of {len(ends)} calls ended with an error that shall be rare"


def _attempts_are_accounted_for(record: Record) -> Iterator[str]:
    started = {entry["attempt"]: entry for entry in record.attempts if entry["event"] == "start"}
    ends = Counter(entry["attempt"] for entry in record.attempts if entry["event"] != "start")
    for attempt, entry in started.items():
        if not ends[attempt] and entry["pid"] not in record.killed:
            yield f"an attempt of {entry['key']} on {_name(record, entry)} has neither ended nor been cancelled"
    for attempt, count in ends.items():
        if count > 1 or attempt not in started:
            yield f"attempt {attempt} ended {count} times and started {int(attempt in started)} times"


def _starts_are_bounded(record: Record, limits: Limits) -> Iterator[str]:
    starts = Counter(entry["key"] for entry in record.attempts if entry["event"] == "start")
    for key, count in starts.items():
        if count > limits.max_starts:
            yield f"rollout {key} was started {count} times"


def _results_have_attempts(record: Record) -> Iterator[str]:
    ended = {call_of(entry["key"]) for entry in record.attempts if entry["event"] == "end"}
    # An evaluation comes to its end also if each of its rows has failed.
    ended |= {entry["call"] for entry in record.calls if entry["event"] == "begin" and entry["kind"] == "eval"}
    for entry in record.calls:
        if entry["event"] == "end" and entry["outcome"] == "result" and entry["call"] not in ended:
            yield f"call {entry['call']} has a result, but no attempt of it ended"


def _no_orphans(record: Record, limits: Limits) -> Iterator[str]:
    over = {entry["call"]: entry["at"] for entry in record.calls if entry["event"] == "end"}
    callers = {entry["call"]: entry["pid"] for entry in record.calls if entry["event"] == "begin"}
    ends = {entry["attempt"]: entry["at"] for entry in record.attempts if entry["event"] != "start"}
    deaths = {window.target: window.from_s for window in record.windows if window.label.startswith("#dead ")}
    for entry in record.attempts:
        if entry["event"] != "start" or entry["attempt"] not in ends:
            continue
        call = call_of(entry["key"])
        caller = callers.get(call, 0)
        unwanted_from = over.get(call, deaths.get(f"#{caller}"))
        if unwanted_from is None:
            continue
        unwanted_from = max(unwanted_from, entry["at"])
        involved = {record.names.get(caller, ""), _name(record, entry), "nats", "controller"}
        fair_s = limits.orphan_s + _disturbed_s(record.windows, involved, unwanted_from, ends[entry["attempt"]])
        if (over_s := ends[entry["attempt"]] - unwanted_from) > fair_s:
            yield (
                f"an attempt of {entry['key']} on {_name(record, entry)} went on for {over_s:.1f} s after its call, "
                f"{fair_s:.1f} s are fair"
            )


def _disturbed_s(windows: Iterable[Window], targets: set[str], from_s: float, to_s: float) -> float:
    concerned = [window for window in windows if window.target in targets]
    return sum(max(0.0, min(to_s, window.to_s) - max(from_s, window.from_s)) for window in concerned)


def _servers_are_quiet(record: Record) -> Iterator[str]:
    for name, counts in record.beats.items():
        if any(counts.values()):
            yield f"{name} is not quiet at the end: {counts}"


def _nothing_leaks(record: Record, limits: Limits) -> Iterator[str]:
    most: dict[str, Entry] = defaultdict(dict)
    for entry in record.vitals:
        if entry["tag"] == "base":
            base = most[record.roles[entry["pid"]]]
            for what in ("tasks", "threads", "fds", "rss"):
                base[what] = max(base.get(what, 0), entry[what])
    more = {
        "tasks": limits.more_tasks,
        "threads": limits.more_threads,
        "fds": limits.more_fds,
        "rss": limits.more_rss_bytes,
    }
    for entry in record.vitals:
        if entry["tag"] != "end":
            continue
        for what, margin in more.items():
            if entry[what] > most[record.roles[entry["pid"]]].get(what, 0) + margin:
                base_value = most[record.roles[entry["pid"]]].get(what)
                yield f"{_name(record, entry)} has {entry[what]:,} {what} at the end, {base_value:,} at the start"
        if any(entry["tables"].values()):
            yield f"{_name(record, entry)} still holds {entry['tables']}"


def call_of(key: str) -> str:
    """The call that a rollout belongs to: its own key, or that before the slash."""
    return key.partition("/")[0]


def _name(record: Record, entry: Entry) -> str:
    return record.names.get(entry["pid"], f"process {entry['pid']}")
