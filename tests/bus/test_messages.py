"""The wire messages: stable bytes, tolerant of more fields, strict about the rest (CASES P60)."""

from __future__ import annotations

import contextlib
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envbus.bus.codec import encode
from envbus.bus.messages import (
    MAX_ENTRIES,
    PROTOCOL_VERSION,
    Accepted,
    Announce,
    Beat,
    Busy,
    Cancel,
    Check,
    Control,
    Done,
    ExamplesPage,
    ExamplesRequest,
    Failure,
    Fetch,
    Gone,
    Grant,
    Heard,
    Info,
    InfoRequest,
    Ok,
    Part,
    PartReply,
    Parts,
    Pass,
    Progress,
    Result,
    Run,
    Status,
    Wait,
    WireMessage,
    pack,
    parse,
    parse_as,
)
from envbus.errors import BadRequestError, DecodeError, EnvbusError, ProtocolVersionError

JOB = "0123456789abcdef0123456789abcdef"
PARTS = Parts(size=1000, parts=2, part_bytes=512, checksum=0xDEADBEEF, encoding="zstd", raw_size=5000)
FAILURE = Failure(
    job="c", attempt=1, code="remote", message="m", origin="server1", causes=[("KeyError", "'x'"), ("OSError", "y")]
)
EXAMPLES: dict[str, WireMessage] = {
    "run": Run(job=JOB, attempt=1, client="client1", call="rollout", size=1, start_by=1700000000.5, body=b"\x80"),
    "part": Part(job=JOB, client="c", index=3, data=b"\x00\xff"),
    "check": Check(client="c", jobs=["a", "b"]),
    "fetch": Fetch(client="c", job=JOB, index=0),
    "cancel": Cancel(client="c", jobs=[JOB]),
    "done": Done(client="c", jobs=[]),
    "heard": Heard(client="c", job=JOB, attempt=1, seq=7),
    "wait": Wait(client="client1", n=3),
    "pass": Pass(client="c", grant="7"),
    "info": InfoRequest(),
    "examples": ExamplesRequest(start=5, count=10),
    "control": Control(action="log_level", level="DEBUG"),
    "accepted": Accepted(job=JOB, attempt=1, server="server1"),
    "busy": Busy(job=JOB, attempt=1, server="s", reason="draining"),
    "result": Result(job=JOB, attempt=1, server="server1", body=b"\x80"),
    "announce": Announce(job=JOB, attempt=1, server="server1", parts=PARTS),
    "progress": Progress(job=JOB, attempt=1, server="server1", seq=1, body=b"\x80"),
    "failure": FAILURE,
    "status": Status(server="s", running=["a"], done=["b"], failed=[FAILURE]),
    "part_reply": PartReply(job=JOB, index=1, data=b"x", parts=PARTS),
    "grant": Grant(grant="7", server="server1", ttl_s=2.0),
    "ok": Ok(server="s", state="ready"),
    "info_reply": Info(
        server="s",
        state="ready",
        env="math~0a1b2c3d",
        env_id="math",
        env_args={"level": 1, "nested": {"none": None, "list": [1.5, "é"]}},
        fingerprint="f",
        versions={"envbus": "0.1.0"},
        requires_group_rollouts=False,
        num_eval_examples=10,
        max_concurrent=8,
        max_input_bytes=1,
        max_result_bytes=2**40,
    ),
    "examples_page": ExamplesPage(total=3, start=0, body=b"\x80"),
    "gone": Gone(server="s", reason="exit code -9"),
    "beat": Beat(
        server="s",
        env="odd \ud800 name",
        state="ready",
        host="h",
        pid=1,
        started_at=1.5,
        slots=8,
        in_flight=2,
        waiting_clients=0,
        waiting_jobs=0,
        held_results=0,
        held_bytes=0,
        done=1,
        failed=0,
        cancelled=0,
        busy=0,
        loop_lag_s=0.0,
        oldest_job_s=0.0,
        rss_bytes=1,
        versions={},
        env_id="e",
        fingerprint="f",
        interval_s=1.0,
    ),
}
GOLDEN = {
    "8aa17601a174a372756ea36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a7617474656d7074"
    "01a6636c69656e74a7636c69656e7431a463616c6ca7726f6c6c6f7574a473697a6501a873746172745f6279cb41d954fc40200000a8656e"
    "636f64696e67a0a4626f6479c40180": EXAMPLES["run"],
    "8ba17601a174a372756ea36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a7617474656d7074"
    "02a6636c69656e74a7636c69656e7431a463616c6ca567726f7570a473697a6508ab66696e6765727072696e74a466303064a56772616e74"
    "a137a8656e636f64696e67a0a675706c6f616486a473697a65cd03e8a5706172747302aa706172745f6279746573cd0200a8636865636b73"
    "756dcedeadbeefa8656e636f64696e67a47a737464a87261775f73697a65cd1388": Run(
        job=JOB, attempt=2, client="client1", call="group", size=8, fingerprint="f00d", grant="7", upload=PARTS
    ),
    "85a17601a174a86163636570746564a36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a76174"
    "74656d707401a6736572766572a773657276657231": EXAMPLES["accepted"],
    "85a17601a174a477616974a6636c69656e74a7636c69656e7431a16e03a87072696f7269747900": EXAMPLES["wait"],
    "85a17601a174a56772616e74a56772616e74a137a6736572766572a773657276657231a574746c5f73cb4000000000000000": EXAMPLES[
        "grant"
    ],
    "86a17601a174a8616e6e6f756e6365a36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a76174"
    "74656d707401a6736572766572a773657276657231a5706172747386a473697a65cd03e8a5706172747302aa706172745f6279746573cd02"
    "00a8636865636b73756dcedeadbeefa8656e636f64696e67a47a737464a87261775f73697a65cd1388": EXAMPLES["announce"],
    "87a17601a174a6726573756c74a36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a761747465"
    "6d707401a6736572766572a773657276657231a8656e636f64696e67a0a4626f6479c40180": EXAMPLES["result"],
    "8aa17601a174a372756ea36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a7617474656d7074"
    "01a6636c69656e74a7636c69656e7431a463616c6ca7726f6c6c6f7574a473697a6501a8656e636f64696e67a0a4626f6479c40180a87072"
    "6f6772657373c3": Run(job=JOB, attempt=1, client="client1", call="rollout", size=1, body=b"\x80", progress=True),
    "89a17601a174a870726f6772657373a36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a76174"
    "74656d707401a6736572766572a773657276657231a373657101a46d6f7265c2a361736bc2a4626f6479c40180": EXAMPLES["progress"],
    "86a17601a174a56865617264a6636c69656e74a163a36a6f62d9203031323334353637383961626364656630313233343536373839616263"
    "646566a7617474656d707401a373657107": EXAMPLES["heard"],
    "85a17601a174a5636865636ba6636c69656e74a163a46a6f627391d920303132333435363738396162636465663031323334353637383961"
    "6263646566a870726f67726573739194d9203031323334353637383961626364656630313233343536373839616263646566010507": Check(
        client="c", jobs=[JOB], progress=[(JOB, 1, 5, 7)]
    ),
    "88a17601a174a6726573756c74a36a6f62d9203031323334353637383961626364656630313233343536373839616263646566a761747465"
    "6d707401a6736572766572a773657276657231a8656e636f64696e67a0a4626f6479c40180a870726f677265737309": Result(
        job=JOB, attempt=1, server="server1", body=b"\x80", progress=9
    ),
    "88a17601a174a6737461747573a6736572766572a773657276657231a772756e6e696e6790a7756e6b6e6f776e90a4646f6e6591d9203031"
    "323334353637383961626364656630313233343536373839616263646566a66661696c656490a870726f67726573739192d9203031323334"
    "35363738396162636465663031323334353637383961626364656609": Status(
        server="server1", done=[JOB], progress=[(JOB, 9)]
    ),
}
"""Messages of protocol version 1 as its first release sends them. Add, never change."""


def changed(kind: str, **fields: object) -> bytes:
    return encode({**msgpack.unpackb(pack(EXAMPLES[kind]), unicode_errors="surrogatepass"), **fields})


def test_there_is_an_example_of_every_kind() -> None:
    assert {kind: type(message) for kind, message in EXAMPLES.items()} == {
        cls.kind: cls for cls in WireMessage.__subclasses__() if cls.__module__ == WireMessage.__module__
    }


@pytest.mark.parametrize("message", EXAMPLES.values(), ids=EXAMPLES)
def test_every_kind_comes_back_as_it_was(message: WireMessage) -> None:
    assert parse(pack(message)) == message


@pytest.mark.parametrize(("data", "message"), GOLDEN.items())
def test_the_bytes_of_version_1_stay_the_same(data: str, message: WireMessage) -> None:
    """CASES P60: recorded messages."""
    assert pack(message).hex() == data
    assert parse(bytes.fromhex(data)) == message


@pytest.mark.parametrize("kind", EXAMPLES)
def test_unknown_fields_are_ignored(kind: str) -> None:
    assert parse(changed(kind, new_in_version_9={"deep": [1, 2]})) == EXAMPLES[kind]


def test_unknown_fields_inside_are_ignored_too() -> None:
    parts = {**PARTS.model_dump(), "new": 1}
    assert parse(changed("announce", parts=parts)) == EXAMPLES["announce"]


def test_missing_fields_have_defaults_where_they_can() -> None:
    assert parse(encode({"v": 1, "t": "wait", "client": "client1", "n": 3})) == EXAMPLES["wait"]
    assert parse(encode({"v": 1, "t": "status", "server": "s"})) == Status(server="s")


@pytest.mark.parametrize("version", [0, 2, 99, "1", None, [1], "x" * 100_000])
def test_another_version_is_refused_with_both_named(version: object) -> None:
    """CASES P60."""
    with pytest.raises(ProtocolVersionError, match=f"speaks {PROTOCOL_VERSION}; upgrade") as caught:
        parse(changed("wait", v=version))
    assert repr(version)[:5] in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", ["run2", "", None, 1, ["run"], b"run", "x" * 100_000])
def test_an_unknown_kind_is_a_bad_request(kind: object) -> None:
    with pytest.raises(BadRequestError, match="unknown message kind") as caught:
        parse(changed("wait", t=kind))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "fields", "names"),
    [
        ("run", {"attempt": 0}, "run: attempt"),
        ("run", {"attempt": "first"}, "run: attempt"),
        ("run", {"size": 0}, "run: size"),
        ("run", {"size": 100_001}, "run: size"),
        ("run", {"call": "eval"}, "run: call"),
        ("run", {"job": "a.b"}, "run: job"),
        ("run", {"job": "*"}, "run: job"),
        ("run", {"job": ""}, "run: job"),
        ("run", {"job": "a" * 65}, "run: job"),
        ("run", {"job": "a\n"}, "run: job"),
        ("run", {"client": None}, "run: client"),
        ("run", {"body": 7}, "run: body"),
        ("run", {"encoding": "gzip"}, "run: encoding"),
        ("run", {"upload": {"size": -1}}, "run: upload.size"),
        ("run", {"upload": []}, "run: upload"),
        ("part", {"index": -1}, "part: index"),
        ("check", {"jobs": "abc"}, "check: jobs"),
        ("check", {"jobs": ["ok", "not ok"]}, "check: jobs.1"),
        ("wait", {"n": -1}, "wait: n"),
        ("wait", {"n": float("nan")}, "wait: n"),
        ("examples", {"count": 10_001}, "examples: count"),
        ("control", {"action": "explode"}, "control: action"),
    ],
)
def test_a_wrong_field_is_named(kind: str, fields: dict[str, object], names: str) -> None:
    with pytest.raises(BadRequestError, match=f"^{names}: "):
        parse(changed(kind, **fields))


def test_another_kind_than_expected_is_refused() -> None:
    assert parse_as(pack(EXAMPLES["ok"]), Ok) == EXAMPLES["ok"]
    with pytest.raises(DecodeError, match="expected status, got ok"):
        parse_as(pack(EXAMPLES["ok"]), Status)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", b"\x01", b"{}", b"\x81", encode([1]), encode("run")])
def test_bytes_that_are_no_map_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        parse(data)


@given(st.binary(max_size=200))
@example(b"\x81\xa1t" + b"\x91" * 150)
def test_random_bytes_raise_errors_of_ours_only(data: bytes) -> None:
    with pytest.raises(EnvbusError):
        parse(data)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data(), kind=st.sampled_from(sorted(EXAMPLES)))
def test_random_fields_make_a_message_or_an_error_of_ours(data: st.DataObject, kind: str) -> None:
    names = sorted(type(EXAMPLES[kind]).model_fields)
    junk = data.draw(st.dictionaries(st.sampled_from([*names, "v", "other"]), JUNK, max_size=4))
    try:
        message = parse(changed(kind, **junk))
    except EnvbusError:
        return
    assert parse(pack(message)).kind == kind


@given(st.integers(0, 400), st.integers(0, 255))
def test_damaged_messages_raise_errors_of_ours_only(at: int, byte: int) -> None:
    data = bytearray(pack(EXAMPLES["info_reply"]))
    data[at % len(data)] = byte
    with contextlib.suppress(EnvbusError):
        parse(bytes(data))


LISTS = {"check": "jobs", "status": "running", "failure": "causes", "beat": "recent", "controller_beat": "processes"}


@pytest.mark.parametrize("kind", LISTS)
def test_what_is_wrong_with_many_items_is_told_of_the_first_only(kind: str) -> None:
    """All of it would take 550 bytes for each byte of the message, and seconds of the bus thread."""
    data = encode({"v": 1, "t": kind, LISTS[kind]: [1] * 100_000})
    tracemalloc.start()
    with pytest.raises(BadRequestError):
        parse(data)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 10 * 2**20


def test_a_map_of_counts_is_bounded() -> None:
    many = {str(number): 1 for number in range(MAX_ENTRIES + 1)}
    with pytest.raises(BadRequestError, match="failed_by_type"):
        parse(changed("beat", failed_by_type=many))


@pytest.mark.parametrize(("kind", "name"), [("wait", "n"), ("wait", "priority"), ("beat", "pid"), ("run", "attempt")])
def test_integers_are_of_64_bits(kind: str, name: str) -> None:
    """Larger ones would fail where they are added up or shown, not here."""
    with pytest.raises(BadRequestError, match=name):
        parse(changed(kind, **{name: 2**70}))


@pytest.mark.parametrize("version", [True, [1, 2], {}, np.zeros(3)])
def test_a_version_that_is_no_number_is_refused(version: object) -> None:
    with pytest.raises(ProtocolVersionError):
        parse(encode({"v": version, "t": "info"}))


@pytest.mark.parametrize(
    ("server", "origin", "sender"),
    [
        ("s", "o", "s"),
        (None, "o", "o"),
        (None, "", None),
        (None, "a b", None),
        (None, "x\r\n", None),
        (None, "s\n", None),
    ],
)
def test_who_reports_a_failure(server: str | None, origin: str, sender: str | None) -> None:
    """What is no id must never become a subject."""
    assert Failure(server=server, origin=origin, code="remote", message="m").sender == sender
