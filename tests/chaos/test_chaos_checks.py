"""Each violation is found in a ledger that has it, and a ledger of a good run has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from chaos_checks import Limits, Record, Window, hanging, violations

CLIENT, SERVER = 10, 20
LIMITS = Limits(max_starts=3, orphan_s=5.0)


def begin(call: str, kind: str = "short", at: float = 0.0) -> dict[str, Any]:
    return {"event": "begin", "call": call, "kind": kind, "pid": CLIENT, "at": at}


def end(call: str, outcome: str = "result", at: float = 2.0, **more: Any) -> dict[str, Any]:
    more = {"right": True} if outcome == "result" and not more else more
    return {"event": "end", "call": call, "outcome": outcome, "pid": CLIENT, "at": at, "error": "…"} | more


def attempt(key: str, start: float = 1.0, stop: float | None = 1.5, how: str = "end") -> list[dict[str, Any]]:
    name = f"{key}@{start}"
    lines = [{"event": "start", "key": key, "attempt": name, "pid": SERVER, "at": start}]
    return lines + (
        [{"event": how, "key": key, "attempt": name, "pid": SERVER, "at": stop}] if stop is not None else []
    )


def vitals(tag: str, pid: int, **more: Any) -> dict[str, Any]:
    return {"tag": tag, "pid": pid, "tasks": 9, "threads": 5, "fds": 20, "rss": 10**8, "tables": {"jobs": 0}} | more


def good() -> Record:
    return Record(
        calls=[
            begin("a"),
            end("a"),
            begin("b", "cancel"),
            end("b", "cancelled"),
            begin("c", "timeout"),
            end("c", "CallTimeoutError"),
            begin("d", "group"),
            end("d"),
            begin("e"),
            end("e", "NoServerError"),
        ],
        attempts=[*attempt("a"), *attempt("b", how="cancel"), *attempt("d/0"), *attempt("d/1")],
        names={CLIENT: "client-0", SERVER: "server-0"},
        roles={CLIENT: "client", SERVER: "server"},
        vitals=[vitals(tag, pid) for tag in ("base", "end") for pid in (CLIENT, SERVER)],
        beats={"server-0": {"running": 0, "held": 0, "waiting": 0}},
    )


def test_a_good_run_has_no_violations() -> None:
    assert violations(good(), LIMITS) == []


CASES: dict[str, tuple[Callable[[Record], object], str]] = {
    "a call that hangs": (lambda r: r.calls.append(begin("x")), "never ended"),
    "a call that ends twice": (lambda r: r.calls.append(end("a")), "ended 2 times"),
    "an end of nothing": (lambda r: r.calls.append(end("x", "NoServerError")), "without having begun"),
    "a wrong result": (lambda r: r.calls.append(r.calls.pop(1) | {"right": False}), "wrong result"),
    "a result of what never ends": (
        lambda r: (r.calls.extend([begin("x", "timeout"), end("x")]), r.attempts.extend(attempt("x"))),
        "though its rollout never ends",
    ),
    "a cancel by nobody": (lambda r: r.calls.extend([begin("x"), end("x", "cancelled")]), "by nobody"),
    "a time limit out of nothing": (
        lambda r: r.calls.extend([begin("x"), end("x", "CallTimeoutError")]),
        "a time limit of its own",
    ),
    "an untyped error": (lambda r: r.calls.extend([begin("x"), end("x", "KeyError")]), "none of envbus"),
    "a typed error that has no cause here": (
        lambda r: r.calls.extend([begin("x"), end("x", "ResultLostError")]),
        "ended with ResultLostError",
    ),
    "a closed connection without a close": (
        lambda r: r.calls.extend([begin("x"), end("x", "BusClosedError")]),
        "ended with BusClosedError",
    ),
    "a late request with right clocks": (
        lambda r: r.calls.extend([begin("x"), end("x", "LateRequestError")]),
        "ended with LateRequestError",
    ),
    "many lost calls": (
        lambda r: r.calls.extend(line for n in range(5) for line in (begin(f"x{n}"), end(f"x{n}", "ServerLostError"))),
        "shall be rare",
    ),
    "an attempt that goes on for ever": (lambda r: r.attempts.extend(attempt("a", 1.1, None)), "neither ended nor"),
    "an attempt that ends twice": (lambda r: r.attempts.append(r.attempts[1]), "ended 2 times"),
    "an end of an attempt that never began": (lambda r: r.attempts.extend(attempt("x")[1:]), "started 0 times"),
    "too many attempts": (
        lambda r: r.attempts.extend(line for n in range(3) for line in attempt("a", 1.1 + n / 10)),
        "started 4 times",
    ),
    "a result out of nothing": (lambda r: r.calls.extend([begin("x"), end("x")]), "no attempt of it ended"),
    "an attempt after its call": (lambda r: r.attempts.extend(attempt("b", 1.1, 7.5, "cancel")), "went on for 5.5 s"),
    "an attempt after its client": (
        lambda r: (
            r.killed.add(CLIENT),
            r.calls.append(begin("x")),
            r.windows.append(Window("#dead process", f"#{CLIENT}", 2.0, 2.0)),
            r.attempts.extend(attempt("x", 1.1, 7.5)),
        ),
        "went on for 5.5 s",
    ),
    "a slot that is not free": (lambda r: r.beats["server-0"].update(running=1), "not quiet"),
    "a result that is held": (lambda r: r.beats["server-0"].update(held=1), "not quiet"),
    "a client that waits": (lambda r: r.beats["server-0"].update(waiting=1), "not quiet"),
    "tasks": (lambda r: r.vitals.append(vitals("end", SERVER, tasks=16)), "16 tasks"),
    "threads": (lambda r: r.vitals.append(vitals("end", SERVER, threads=10)), "10 threads"),
    "descriptors": (lambda r: r.vitals.append(vitals("end", CLIENT, fds=31)), "31 fds"),
    "memory": (lambda r: r.vitals.append(vitals("end", CLIENT, rss=4 * 10**8)), "400,000,000 rss"),
    "a table": (lambda r: r.vitals.append(vitals("end", CLIENT, tables={"jobs": 1})), "still holds {'jobs': 1}"),
    "a process that died": (lambda r: r.exits.append("server-0 ended by itself"), "by itself"),
    "a process that stays": (lambda r: r.left.append("python x"), "left behind: python x"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_violation_is_found(name: str) -> None:
    spoil, what = CASES[name]
    record = good()
    spoil(record)
    found = violations(record, LIMITS)
    assert len(found) == 1
    assert what in found[0]


def test_a_killed_client_leaves_calls_and_a_killed_server_attempts_without_end() -> None:
    record = good()
    record.calls.append(begin("x"))
    record.attempts += attempt("a", 1.1, None)
    assert [entry["call"] for entry in hanging(record)] == ["x"]
    record.killed = {CLIENT, SERVER}
    assert violations(record, LIMITS) == []
    assert hanging(record) == []


def test_what_a_fault_delays_is_no_orphan() -> None:
    record = good()
    record.attempts += attempt("b", 1.1, 7.5, "cancel")
    record.windows.append(Window("stop server", "server-0", 1.0, 4.0))
    assert violations(record, LIMITS) == []
    record.windows[0] = Window("stop server", "server-1", 1.0, 4.0)
    assert len(violations(record, LIMITS)) == 1


def test_a_result_that_was_held_in_vain_is_fine_if_rare() -> None:
    record = good()
    record.calls += [begin("x"), end("x", "ResultLostError", error="not collected within 20 s")]
    assert violations(record, LIMITS) == []


def test_a_late_request_is_fine_while_a_clock_is_wrong() -> None:
    record = good()
    record.calls += [begin("x"), end("x", "LateRequestError", at=3.0)]
    record.windows.append(Window("clock server", "server-0", 2.0, 4.0))
    assert violations(record, LIMITS) == []


def test_a_client_that_was_asked_to_end_closes_its_calls() -> None:
    record = good()
    record.calls += [begin("x"), end("x", "BusClosedError")]
    record.terminated.add(CLIENT)
    assert violations(record, LIMITS) == []
