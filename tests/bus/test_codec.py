"""Bytes there and back, and bytes from strangers (CASES P28, P29, P34, P38, P41; DESIGN 7)."""

import asyncio
import math
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envbus.bus.codec import CONTROL_LIMITS, Limits, decode, decode_map, encode, to_plain
from envbus.bus.extensions import PACKED_LIST_MIN
from envbus.errors import DecodeError, EncodeError

GOLDEN = {
    "id": 7,
    "text": "é",
    "nan": math.inf,
    "raw": b"\xff",
    "big": -(2**64),
    "a": np.array([[1, 2]], dtype=np.int16),
}
GOLDEN_BYTES = bytes.fromhex(
    "86"
    "a26964" "07"
    "a474657874" "a2c3a9"
    "a36e616e" "cb7ff0000000000000"
    "a3726177" "c401ff"
    "a3626967" "c70902" "0000000000000000ff"
    "a161" "c71b01" "05696e743136" "02" "0100000000000000" "0200000000000000" "01000200"
)  # fmt: skip


def test_golden_bytes() -> None:
    assert encode(GOLDEN) == GOLDEN_BYTES
    decoded = decode_map(GOLDEN_BYTES)
    assert decoded.pop("a").tolist() == [[1, 2]]
    assert decoded == {key: item for key, item in GOLDEN.items() if key != "a"}


def test_golden_bytes_of_a_packed_list() -> None:
    ids = [-1] + [0] * (PACKED_LIST_MIN - 1)
    assert encode(ids) == b"\xc8" + struct.pack(">HB", PACKED_LIST_MIN + 1, 3) + b"b\xff" + bytes(PACKED_LIST_MIN - 1)


surrogates_too = st.text(st.characters(exclude_categories=()), max_size=8)
keys = st.one_of(surrogates_too, st.integers(), st.none(), st.floats(), st.binary(max_size=4), st.tuples(st.integers()))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False),
    surrogates_too,
    st.binary(max_size=8),
    st.dates(),
    st.decimals(),
    st.uuids(),
    st.complex_numbers(),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=5),
        st.frozensets(st.integers(), max_size=4),
    ),
    max_leaves=25,
)


def exact(value: Any) -> Any:
    if type(value) is dict:
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if type(value) is list else (type(value), value)


@given(values)
def test_decode_of_encode_is_to_plain(value: Any) -> None:
    """P38, P41: a local run and a remote one agree, whatever the value."""
    try:
        plain = to_plain(value)
    except EncodeError:
        with pytest.raises(EncodeError, match="same string"):
            encode(value)
    else:
        assert exact(decode(encode(value))) == exact(plain)
        assert exact(to_plain(plain)) == exact(plain)


@given(
    st.sampled_from(["bool", "int8", "uint16", "int64", "float16", "float32", ">f8", ">i4", "complex128"]),
    st.lists(st.integers(0, 3), max_size=4),
)
def test_arrays_round_trip(dtype: str, shape: list[int]) -> None:
    """P28."""
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype).T
    decoded = decode(encode(array))
    assert (decoded.dtype.name, decoded.shape) == (array.dtype.name, array.shape)
    assert np.array_equal(decoded, array)


LONG_LISTS: dict[str, list[Any]] = {
    "masks": [0, 1] * 40_000,
    "token ids": list(range(100_000, 180_000)),
    "64-bit": [2**40] * 5_000,
    "unsigned 64-bit": [2**64 - 1] * 5_000,
    "over 64 bits late": [1] * 70_000 + [2**100],
    "logprobs": [-0.5, math.inf, -0.0] * 2_000,
    "int among floats": [0.5] * 70_000 + [1],
    "bool among ints": [1] * 70_000 + [True],
    "None": [0.5] * 5_000 + [None],
    "dicts": [{"a": 1}] * 5_000,
    "dict at the end": [1] * 70_000 + [{(1, 2): {3}}],
    "strings": ["a"] * 5_000,
}


@pytest.mark.parametrize("long_list", LONG_LISTS.values(), ids=LONG_LISTS)
def test_long_lists_keep_every_value_and_type(long_list: list[Any]) -> None:
    """P34."""
    decoded = decode(encode({"ids": long_list, "as_tuple": tuple(long_list)}))
    assert exact(decoded["ids"]) == exact(to_plain(long_list))
    assert exact(decoded["as_tuple"]) == exact(to_plain(long_list))


def test_an_integer_over_the_bound_is_refused_with_its_path() -> None:
    limit = 2 ** (8 * 1024 - 1)
    assert decode(encode([limit - 1, -limit])) == [limit - 1, -limit]
    for value in (limit, -limit - 1):
        with pytest.raises(EncodeError, match="integer") as caught:
            encode({"info": [{"ok": 2**70}, {"n": value}]})
        assert caught.value.path == "info[1].n"


def test_limits_of_encode() -> None:
    with pytest.raises(EncodeError, match="over the limit of 100 bytes"):
        encode("x" * 100, limits=Limits(max_bytes=100))
    with pytest.raises(EncodeError, match="deeper"):
        encode([[[]]], limits=Limits(max_depth=2))
    with pytest.raises(EncodeError, match="more than 4 containers"):
        encode([{}, {"a": 1}, []], limits=Limits(max_nodes=4))


@pytest.mark.parametrize("value", [[{}, {"a": 1}], {"a": [[]]}, [[0] * PACKED_LIST_MIN] * 3])
def test_decode_accepts_what_encode_accepts_and_not_less(value: Any) -> None:
    for max_nodes in range(1, 6):
        for max_depth in range(1, 5):
            limits = Limits(max_nodes=max_nodes, max_depth=max_depth)
            try:
                data = encode(value, limits=limits)
            except EncodeError:
                if max_nodes < 4:  # a message of no more nodes than max_depth cannot be too deep
                    with pytest.raises(DecodeError):
                        decode(encode(value), limits=limits)
            else:
                assert decode(data, limits=limits) == value


def nested(depth: int, opening: bytes = b"\x91", core: bytes = b"\xc0") -> bytes:
    return opening * depth + core


def ext(code: int, payload: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, payload))


def array_payload(name: bytes, shape: list[int], elements: bytes) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return bytes([len(name)]) + name + bytes([len(shape)]) + dims + elements


MALFORMED = {
    "nothing": b"",
    "reserved byte": b"\xc1",
    "trailing byte": b"\xc0\xc0",
    "short string": b"\xa5abc",
    "4 GiB string": b"\xdb\xff\xff\xff\xff",
    "4 G list": b"\xdd\xff\xff\xff\xff",
    "4 G map": b"\xdf\xff\xff\xff\xff",
    "invalid utf-8": b"\xa1\xff",
    "int key": b"\x81\x01\x01",
    "nil key": b"\x81\xc0\x01",
    "list key": b"\x81\x90\x01",
    "bytes key": b"\x81\xc4\x01a\x01",
    "nan key": b"\x81\xcb\x7f\xf8" + bytes(6) + b"\x01",
    "same key twice": b"\x82\xa1a\x01\xa1a\x02",
    "65 deep": nested(65),
    "65 maps deep": nested(65, b"\x81\xa1a"),
    "deep beside much": b"\x92" + b"\xdc\xff\xff" + b"\x90" * 65535 + nested(64),
    "1,000 deep": nested(1000),
    "100,000 deep": nested(100_000),
    "unknown ext": ext(4, b"x"),
    "unknown negative ext": b"\xd4\xfex",
    "timestamp of 5 bytes": b"\xc7\x05\xff12345",
    "empty big int": ext(2, b""),
    "long big int": ext(2, bytes(1025)),
    "empty packed list": ext(3, b""),
    "packed list of another code": ext(3, b"u1234"),
    "packed list cut": ext(3, b"i1234567"),
    "empty array": ext(1, b""),
    "array name cut": ext(1, b"\x09int"),
    "array shape cut": ext(1, b"\x04int8\x02" + bytes(15)),
    "object array": ext(1, array_payload(b"object", [1], bytes(8))),
    "name not ascii": ext(1, array_payload(b"int\xff", [1], bytes(1))),
    "dtype with byte order": ext(1, array_payload(b">i4", [1], bytes(4))),
    "array too short": ext(1, array_payload(b"int32", [2], bytes(7))),
    "array too long": ext(1, array_payload(b"int32", [2], bytes(9))),
    "negative dimension": ext(1, array_payload(b"int8", [2**64 - 1, 2**64 - 1], bytes(1))),
    "zero and huge": ext(1, array_payload(b"int8", [0, 2**63], b"")),
    "huge and zero": ext(1, array_payload(b"int8", [2**30, 0], b"")),
    "33 dimensions": ext(1, array_payload(b"int8", [1] * 33, b"1")),
    "255 dimensions": ext(1, array_payload(b"int8", [1] * 255, b"1")),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_bytes_are_decode_errors(data: bytes) -> None:
    for form in (data, bytearray(data), memoryview(data)):
        with pytest.raises(DecodeError) as caught:
            decode(form)
        assert len(str(caught.value)) < 300


def test_64_deep_is_allowed() -> None:
    assert to_plain(decode(nested(64))) == decode(nested(64))
    assert decode(b"\x92\xdc\xff\xff" + b"\x90" * 65535 + nested(63))[0][-1] == []


def test_a_timestamp_of_msgpack_reads_as_seconds() -> None:
    assert decode(msgpack.packb(msgpack.Timestamp(3, 500_000_000))) == 3.5


def test_lone_surrogates_survive_in_keys_and_values() -> None:
    """Kept as they are, so that nothing a model wrote is altered."""
    text = "a\udcff\ud83d\ude00"
    assert decode(encode({text: [text]})) == {text: [text]}


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        value = decode(data)
    except DecodeError:
        return
    to_plain(value)


RICH = encode({**GOLDEN, "ids": list(range(PACKED_LIST_MIN)), "rows": [{"a": [1.5, None, True]}] * 3})


@given(st.data())
@settings(max_examples=500)
def test_mutated_bytes_decode_or_are_refused(data: st.DataObject) -> None:
    mutated = bytearray(RICH)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(RICH) - 1))] = data.draw(st.integers(0, 255))
    try:
        value = decode(mutated)
    except DecodeError:
        return
    encode(value)


def test_every_truncation_is_refused() -> None:
    for end in range(len(GOLDEN_BYTES)):
        with pytest.raises(DecodeError):
            decode(GOLDEN_BYTES[:end])


def peak_bytes(action: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BOMBS = {
    "empty lists": b"\xdd" + struct.pack(">I", 10**6) + b"\x90" * 10**6,
    "empty maps": b"\xdd" + struct.pack(">I", 10**6) + b"\x80" * 10**6,
    "nested headers": (b"\xdd" + struct.pack(">I", 900_000)) * 200 + bytes(10**6),
    "nested complete": b"\xdd\x00\x00\x00\x01" * 900 + b"\xdd" + struct.pack(">I", 10**6) + b"\x90" * 10**6,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_bombs_fail_early_and_cheaply(bomb: bytes) -> None:
    """One list of a million slots (8 MB) and the limit's nodes may exist, not millions of containers."""

    def refuse() -> None:
        with pytest.raises(DecodeError):
            decode(bomb, limits=Limits(max_bytes=2**21, max_nodes=10_000))

    assert peak_bytes(refuse) < 12 * 2**20


def test_64_mb_of_empty_lists_is_refused_in_time() -> None:
    bomb = b"\xdd" + struct.pack(">I", 2**26) + b"\x90" * 2**26
    started = time.monotonic()
    with pytest.raises(DecodeError, match="containers"):
        decode(bomb, limits=Limits(max_nodes=2**20))
    assert time.monotonic() - started < 60


def test_size_is_checked_before_anything_else() -> None:
    with pytest.raises(DecodeError, match=r"1,048,577 bytes, over the limit of 1,048,576 bytes"):
        decode(b"\xc1" * (2**20 + 1), limits=CONTROL_LIMITS)


@pytest.mark.parametrize("data", [b"\x90", b"\xc0", b"\xa1a", encode(2**70), encode(np.int8([1]))])
def test_decode_map_wants_a_map(data: bytes) -> None:
    decode(data)
    with pytest.raises(DecodeError, match="a map is expected"):
        decode_map(data)


def rollout_with_tokens(count: int) -> dict[str, Any]:
    rng = random.Random(5)
    tokens = {
        "completion_ids": [rng.randrange(150_000) for _ in range(count)],
        "completion_mask": [1] * count,
        "completion_logprobs": [-rng.random() for _ in range(count)],
    }
    return {"trajectory": [{"tokens": tokens}], "reward": 1.0}


def best_of(runs: int, action: Callable[[], Any]) -> float:
    def timed() -> float:
        started = time.process_time()
        action()
        return time.process_time() - started

    return min(timed() for _ in range(runs))


def test_token_lists_cost_about_what_bare_msgpack_costs() -> None:
    """P34."""
    rollout = rollout_with_tokens(200_000)
    data, bare = encode(rollout), msgpack.packb(rollout)
    assert best_of(3, lambda: encode(rollout)) < 6 * best_of(3, lambda: msgpack.packb(rollout)) + 0.01
    assert best_of(3, lambda: decode(data)) < 3 * best_of(3, lambda: msgpack.unpackb(bare)) + 0.01
    assert len(data) < 1.05 * len(bare)


async def worst_loop_lag_s(work: Callable[[], Any]) -> float:
    worst_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        future = asyncio.get_running_loop().run_in_executor(pool, work)
        while not future.done():
            started = time.monotonic()
            await asyncio.sleep(0)
            worst_s = max(worst_s, time.monotonic() - started)
        await future
    return worst_s


async def test_the_event_loop_runs_while_a_thread_encodes_and_decodes() -> None:
    """P34: no call of C code holds the interpreter for as long as bare msgpack's single one does."""
    rollout = rollout_with_tokens(1_000_000)
    bare_s = await worst_loop_lag_s(lambda: msgpack.unpackb(msgpack.packb(rollout)))
    lag_s = await worst_loop_lag_s(lambda: decode(encode(rollout)))
    assert lag_s < 0.5 * bare_s


def test_numpy_is_imported_only_when_an_array_arrives() -> None:
    check = (
        "import sys; from envbus.bus.codec import decode, encode; decode(encode({'a': [1.5, {2}]})); "
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_an_array_without_numpy_is_a_decode_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(DecodeError, match="numpy is not installed"):
        decode(GOLDEN_BYTES)


def test_threads_do_not_mix_messages() -> None:
    values = [{"worker": n, "rows": [[n] * 50, {"n": 2**70 + n}] * 50} for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda value: decode(encode(value)), values * 20)) == values * 20
