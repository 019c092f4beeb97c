"""Inputs on their way in, results on their way out, and plain requests."""

from __future__ import annotations

import os

import pytest

from envbus.bus.codec import decode_map, encode
from envbus.bus.messages import Announce, Failure, Result, parse, parse_as
from envbus.bus.transfer import Assembly, Packed, cut, pack_body, part_of
from envbus.errors import BadRequestError, DecodeError, ResultTooLargeError
from envbus.server.outcomes import ENVELOPE_BYTES, hold, part_bytes, tell, tell_part
from envbus.server.plain_requests import answer, as_run, busy
from envbus.server.uploads import Uploads
from envbus.settings import INLINE_BYTES, PART_BYTES

MIB = 1024 * 1024


def packed(body: bytes) -> Packed:
    return Packed(body, "", len(body))


def failure(**fields: object) -> Failure:
    return Failure.model_validate({"code": "remote", "message": "it broke", "causes": [("KeyError", "'x'")], **fields})


# ---- uploads


def test_an_input_comes_in_any_order_and_some_parts_twice() -> None:
    body = os.urandom(1000)
    parts = cut(packed(body), 300)
    uploads = Uploads(max_bytes=MIB)
    uploads.begin("job", parts)
    for index in (3, 0, 0, 1):
        assert uploads.put("job", index, part_of(body, parts, index)) is None
    whole = uploads.put("job", 2, part_of(body, parts, 2))
    assert whole is not None
    assert whole.body() == body
    assert uploads.put("job", 2, part_of(body, parts, 2)) is None
    assert not uploads.drop("job")


def test_a_compressed_input_is_unpacked() -> None:
    body = b"token " * 100_000
    packed_body = pack_body(body)
    assert packed_body.encoding == "zstd"
    uploads = Uploads(max_bytes=MIB)
    uploads.begin("job", cut(packed_body, MIB))
    whole = uploads.put("job", 0, packed_body.data)
    assert whole is not None
    assert whole.body() == body


def test_an_input_over_the_limit_is_refused_before_it_comes() -> None:
    uploads = Uploads(max_bytes=999)
    with pytest.raises(BadRequestError, match="ENVBUS_SERVER_MAX_INPUT_BYTES"):
        uploads.begin("job", cut(packed(bytes(1000)), 300))
    assert not uploads.drop("job")


def test_a_wrong_part_is_a_bad_request_and_a_damaged_whole_is_found() -> None:
    body = bytes(1000)
    uploads = Uploads(max_bytes=MIB)
    uploads.begin("job", cut(packed(body), 600))
    with pytest.raises(BadRequestError, match="part 0"):
        uploads.put("job", 0, b"short")
    with pytest.raises(BadRequestError, match="part 7"):
        uploads.put("job", 7, bytes(600))
    uploads.put("job", 0, b"x" * 600)
    whole = uploads.put("job", 1, bytes(400))
    assert whole is not None
    with pytest.raises(DecodeError, match="checksum"):
        whole.body()


def test_a_dropped_input_takes_no_more_parts() -> None:
    uploads = Uploads(max_bytes=MIB)
    uploads.begin("job", cut(packed(bytes(1000)), 600))
    assert uploads.drop("job")
    assert uploads.put("job", 0, bytes(600)) is None


# ---- outcomes


def test_a_small_result_rides_on_its_message() -> None:
    held = hold(packed(b"body"), max_payload=MIB, max_bytes=MIB)
    result = parse_as(tell(held, job="j", attempt=2, server="s", max_payload=MIB), Result)
    assert (result.job, result.attempt, result.server, result.body) == ("j", 2, "s", b"body")


@pytest.mark.parametrize(
    ("size", "max_payload", "kind"),
    [
        (INLINE_BYTES, MIB, Result),
        (INLINE_BYTES + 1, MIB, Announce),
        (4096 - ENVELOPE_BYTES, 4096, Result),
        (4096 - ENVELOPE_BYTES + 1, 4096, Announce),
    ],
)
def test_a_message_never_exceeds_the_payload(size: int, max_payload: int, kind: type) -> None:
    held = hold(packed(os.urandom(size)), max_payload=max_payload, max_bytes=MIB)
    data = tell(held, job="j" * 64, attempt=99, server="s" * 64, max_payload=max_payload)
    assert isinstance(parse(data), kind)
    assert len(data) <= max_payload


@pytest.mark.parametrize(("max_payload", "size"), [(MIB, PART_BYTES), (4096, 4096 - ENVELOPE_BYTES), (100, 1)])
def test_size_of_a_part(max_payload: int, size: int) -> None:
    assert part_bytes(max_payload) == size


def test_a_large_result_is_collected_in_parts_that_fit() -> None:
    body = os.urandom(50_000)
    held = hold(packed(body), max_payload=8192, max_bytes=MIB)
    announce = parse_as(tell(held, job="j", attempt=1, server="s", max_payload=8192), Announce)
    assembly = Assembly(announce.parts, max_bytes=MIB)
    for index in range(announce.parts.parts):
        part = tell_part(held, job="j", index=index)
        assert part.parts == announce.parts
        assembly.put(part.index, part.data)
    assert assembly.body() == body
    with pytest.raises(DecodeError, match="there are"):
        tell_part(held, job="j", index=announce.parts.parts)


def test_a_result_over_the_ceiling_is_a_clear_error() -> None:
    with pytest.raises(ResultTooLargeError, match="ENVBUS_SERVER_MAX_RESULT_BYTES"):
        hold(packed(bytes(1001)), max_payload=MIB, max_bytes=1000)


def test_a_failure_names_job_attempt_and_server() -> None:
    told = parse_as(tell(failure(), job="j", attempt=3, server="s", max_payload=MIB), Failure)
    assert (told.job, told.attempt, told.server, told.causes) == ("j", 3, "s", [("KeyError", "'x'")])


# ---- plain requests


@pytest.mark.parametrize(
    ("fields", "call", "size"),
    [({"input": {}}, "rollout", 1), ({"group_inputs": [{}, {}, {}]}, "group", 3)],
)
def test_a_plain_request_becomes_a_job(fields: dict[str, object], call: str, size: int) -> None:
    run = as_run(fields)
    assert (run.call, run.size, run.grant, run.start_by) == (call, size, None, None)
    assert run.job != as_run(fields).job


@pytest.mark.parametrize("fields", [{}, {"x": 1}, {"group_inputs": []}, {"group_inputs": "abc"}, {"group_inputs": {}}])
def test_a_plain_request_that_is_no_call_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequestError, match="input"):
        as_run(fields)


def test_a_group_over_the_limit_is_refused_not_crashed_on() -> None:
    with pytest.raises(BadRequestError, match="group_inputs"):
        as_run({"group_inputs": [{}] * 100_001})


def test_the_one_reply_holds_the_result() -> None:
    body = encode({"output": {"reward": 1.0}})
    reply = decode_map(answer(hold(packed(body), max_payload=MIB, max_bytes=MIB), max_payload=MIB))
    assert reply == {"v": 1, "ok": True, "output": {"reward": 1.0}}


def test_the_one_reply_is_never_compressed() -> None:
    held = hold(pack_body(encode({"output": "a" * 500_000})), max_payload=MIB, max_bytes=MIB)
    assert held.packed.encoding == "zstd"
    assert decode_map(answer(held, max_payload=MIB))["output"] == "a" * 500_000


def test_a_plain_result_that_does_not_fit_is_an_error_that_says_so() -> None:
    held = hold(packed(encode({"output": bytes(5000)})), max_payload=1024, max_bytes=MIB)
    reply = decode_map(answer(held, max_payload=1024))
    assert not reply["ok"]
    assert reply["error"]["code"] == "payload_too_large"
    assert "max_payload" in reply["error"]["message"]


def test_failures_and_busy_have_one_shape() -> None:
    failed = decode_map(answer(failure(), max_payload=MIB))
    full = decode_map(busy("full"))
    assert failed["error"] == {
        "code": "remote",
        "message": "it broke",
        "retryable": False,
        "causes": [["KeyError", "'x'"]],
    }
    assert (full["ok"], full["error"]["code"], full["error"]["retryable"]) == (False, "busy", True)
