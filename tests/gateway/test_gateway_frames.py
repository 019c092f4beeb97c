"""Both protocols as frames, without sockets: what is read, what is refused, what is answered."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from dealers import assembled, classic_body, pack, task_body, unpack
from hypothesis import given
from hypothesis import strategies as st

from envbus.adapters.gateway.classic import Classic
from envbus.adapters.gateway.requests import Cancel, Health, Run
from envbus.adapters.gateway.taskset import Deltas, Taskset
from envbus.errors import BadRequestError, EnvbusError, NoServerError, RemoteError, UsageError

CLASSIC, TASKSET = Classic(), Taskset()
ITEM = {"prompt": [{"role": "user", "content": "hi"}], "example_id": 3, "answer": "x"}


def test_classic_rollout_is_read() -> None:
    config = {"api_base_url": "http://m/v1", "api_key_var": "KEY", "client_idx": 3, "endpoint_configs": []}
    body = classic_body(ITEM, client_config=config, sampling_args={"n": 1}, max_retries=2, state_columns=["a"])
    run = CLASSIC.read([b"\xff\x00", body])
    assert isinstance(run, Run)
    assert (run.request_id, run.kind, run.inputs) == (b"\xff\x00", "rollout", [ITEM])
    assert run.client is not None
    assert (run.client.api_base_url, run.client.api_key_var) == ("http://m/v1", "KEY")
    assert (run.model, run.sampling_args, run.max_retries, run.state_columns) == ("m", {"n": 1}, 2, ["a"])


def test_classic_group_is_read() -> None:
    run = CLASSIC.read([b"1", classic_body(ITEM, ITEM)])
    assert isinstance(run, Run)
    assert (run.kind, run.inputs) == ("group", [ITEM, ITEM])


def test_classic_short_messages() -> None:
    assert CLASSIC.read([b"7", b""]) == Cancel(b"7", target=b"7")
    assert CLASSIC.read([b"health", b"ping"]) == Health(b"health")


def test_request_id_in_the_body_means_nothing() -> None:
    run = CLASSIC.read([b"outer", classic_body(ITEM, request_id="inner")])
    assert isinstance(run, Run)
    assert CLASSIC.done(run, [{"example_id": 3}])[0] == b"outer"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (pack({"request_type": "delete"}), "Unknown request type: delete"),
        (pack({}), "Unknown request type: None"),
        (pack({"request_type": ["run_rollout"]}), "Unknown request type"),
        (classic_body("no map"), "'input' must be a dict, not str"),
        (classic_body(ITEM, 5), "group_inputs must be a list of maps"),
        (classic_body(ITEM, model=None), "'model' must be a str, not NoneType"),
        (classic_body(ITEM, max_retries=True), "'max_retries' must be a int, not bool"),
        (pack([1]), "a msgpack map is expected, not list"),
        (b"\xdf\xff\xff\xff\xff", "not a msgpack map"),
        (pack({}) + b"x", "more bytes follow it"),
        (b"\xc1", "not a msgpack map"),
    ],
)
def test_classic_refusals(body: bytes, text: str) -> None:
    with pytest.raises(BadRequestError, match=text):
        CLASSIC.read([b"1", body])


def test_classic_client_config_that_the_bus_cannot_carry() -> None:
    with pytest.raises(UsageError, match="renderer"):
        CLASSIC.read([b"1", classic_body(ITEM, client_config={"client_type": "renderer"})])


def test_classic_output_has_the_fields_of_the_librarys() -> None:
    run = CLASSIC.read([b"1", classic_body(ITEM)])
    assert isinstance(run, Run)
    request_id, data = CLASSIC.done(run, [{"example_id": 3, "reward": None, "text": "a\ud800", "n": 2**63}])
    answer = unpack(data)
    assert (request_id, answer["success"], answer["error"]) == (b"1", True, None)
    assert answer["output"]["reward"] == 0.0
    assert answer["output"]["timing"]["generation"]["duration"] == 0.0
    assert answer["output"]["text"] == "a\\ud800"


def test_classic_errors() -> None:
    assert unpack(CLASSIC.failed(b"1", NoServerError("nobody"))[1]) == {
        "success": False,
        "error": "NoServerError('nobody')",
    }
    assert unpack(CLASSIC.health(b"1", "loading")[1]) == {"success": False, "error": "loading"}
    assert unpack(CLASSIC.health(b"1", None)[1]) == {"success": True, "error": None}


def test_taskset_run_is_read() -> None:
    run = TASKSET.read([b"1", b"run", pack({"task_data": {1: 2}, "client": {}, "model": "m", "sampling": {"n": 1}})])
    assert isinstance(run, Run)
    assert run.inputs == [{"task_data": {1: 2}, "client": {}, "sampling": {"n": 1}}]
    assert run.streams
    assert run.client is None


def test_taskset_says_whose_loopback_the_model_is() -> None:
    body = {"task_data": {}, "client": {"base_url": "http://localhost:1/v1"}, "model": "m", "sampling": {}}
    run = TASKSET.read([b"1", b"run", pack(body)])
    assert isinstance(run, Run)
    assert run.client is not None
    assert (run.client.api_base_url, run.client.api_key_var) == ("http://localhost:1/v1", None)


def test_taskset_short_messages() -> None:
    assert TASKSET.read([b"1", b"health", pack({})]) == Health(b"1")
    assert TASKSET.read([b"1", b"cancel", pack({"request_id": "é"})]) == Cancel(b"1", target="é".encode())


@pytest.mark.parametrize(
    ("method", "body", "text"),
    [
        (b"evaluate", pack({}), "unknown method 'evaluate'"),
        (b"\xff", pack({}), "unknown method"),
        (b"run", pack({}), "'task_data' must be a dict"),
        (b"run", b"\xff", "a msgpack map is expected, not int"),
        (
            b"run",
            pack({"task_data": {}, "client": {"base_url": "localhost:1"}, "model": "m", "sampling": {}}),
            "client.base_url: Value error, must be an http",
        ),
        (b"cancel", pack({}), "'request_id' must be a str"),
    ],
)
def test_taskset_refusals(method: bytes, body: bytes, text: str) -> None:
    with pytest.raises(BadRequestError, match=text):
        TASKSET.read([b"1", method, body])


def test_taskset_replies() -> None:
    run = TASKSET.read([b"1", b"run", task_body(idx=1)])
    assert isinstance(run, Run)
    episode = {"head": {"id": "e"}, "traces": [{"id": "t", "nodes": 1, "calls": 0}]}
    request_id, kind, data = TASKSET.done(run, [{"episode": episode}])
    assert (request_id, kind) == (b"1", b"reply")
    assert unpack(data) == {"success": True, "error": None, **episode}
    with pytest.raises(RemoteError, match=r"ValueError\('x'\)"):
        TASKSET.done(run, [{"error": {"error": "ValueError", "error_chain_repr": "ValueError('x')"}}])
    with pytest.raises(RemoteError, match="runs no tasks"):
        TASKSET.done(run, [{"reward": 1.0}])
    assert TASKSET.health(b"1", "loading") is None
    assert unpack(TASKSET.cancel(b"2", True)[2]) == {"success": True, "error": None, "cancelled": True}
    assert unpack(TASKSET.failed(b"1", ValueError("x"))[2]) == {"success": False, "error": "ValueError: x"}


def test_a_lost_attempts_traces_are_discarded_before_the_next() -> None:
    deltas = Deltas()
    first = [deltas.of(1, {"trace": name, "open": {}, "nodes": [1]}) for name in "ab"]
    gone = deltas.of(1, {"trace": "a", "discard": True})
    second = deltas.of(2, {"trace": "c", "open": {}, "nodes": [2]})
    assert gone == [{"trace": "a", "discard": True}]
    assert second == [{"trace": "b", "discard": True}, {"trace": "c", "open": {}, "nodes": [2]}]
    assert assembled([delta for each in [*first, gone, second] for delta in each]) == {"c": [2]}


def test_what_a_stalled_attempt_sends_beside_the_next_is_not_passed_on() -> None:
    """The client was told to discard its traces: it could not put it anywhere."""
    deltas = Deltas()
    sent = deltas.of(1, {"trace": "a", "open": {}, "nodes": [1]}) + deltas.of(
        2, {"trace": "b", "open": {}, "nodes": [2]}
    )
    assert deltas.of(1, {"trace": "a", "nodes": [3]}) == []
    sent += deltas.of(2, {"trace": "b", "nodes": [4]})
    assert assembled(sent) == {"b": [2, 4]}


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("abc"), st.booleans()), max_size=30))
def test_what_a_client_has_is_the_last_attempts(steps: list[tuple[int, str, bool]]) -> None:
    deltas, attempt, sent = Deltas(), 1, []
    mine: dict[str, list[Any]] = {}
    for number, (is_new, name, discards) in enumerate(steps):
        if is_new:
            attempt, mine = attempt + 1, {}
        trace = f"{name}{attempt}"
        if discards and trace not in mine:
            continue
        delta: dict[str, Any] = {"trace": trace, "discard": True} if discards else {"trace": trace, "nodes": [number]}
        if discards:
            del mine[trace]
        elif trace not in mine:
            delta["open"] = {}
            mine[trace] = [number]
        else:
            mine[trace].append(number)
        sent += deltas.of(attempt, delta)
        assert assembled(sent) == mine


@given(st.binary(max_size=60), st.sampled_from([b"run", b"cancel", b"health", b"x"]))
def test_garbage_is_read_or_refused(body: bytes, method: bytes) -> None:
    for read, frames in ((CLASSIC.read, [b"1", body]), (TASKSET.read, [b"1", method, body])):
        with contextlib.suppress(EnvbusError):
            read(frames)
