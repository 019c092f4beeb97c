"""Bodies in parts: compressed when it pays, whole or refused."""

from __future__ import annotations

import os
import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from envbus.bus.messages import Parts
from envbus.bus.transfer import COMPRESS_OVER_BYTES, Assembly, Packed, cut, pack_body, part_of, unpack_body
from envbus.errors import DecodeError

MIB = 1024 * 1024


def plain(body: bytes) -> Packed:
    return Packed(body, "", len(body))


def announced(**changes: int) -> Parts:
    return Parts(**({"size": 1000, "parts": 4, "part_bytes": 300, "checksum": 0, "raw_size": 1000} | changes))


def assembled(packed: Packed, parts: Parts, order: list[int], *, max_bytes: int = MIB) -> bytes:
    assembly = Assembly(parts, max_bytes=max_bytes)
    for index in order:
        assembly.put(index, part_of(packed.data, parts, index))
    return assembly.body()


# ---- compression


@pytest.mark.parametrize("size", [0, 1, 1000, COMPRESS_OVER_BYTES])
def test_small_bodies_are_not_compressed(size: int) -> None:
    assert pack_body(b"a" * size) == Packed(b"a" * size, "", size)


def test_a_large_body_that_shrinks_is_compressed() -> None:
    body = b"the same words " * 50_000
    packed = pack_body(body)
    assert (packed.encoding, packed.raw_size) == ("zstd", len(body))
    assert len(packed.data) < len(body) / 10
    assert unpack_body(packed.data, "zstd", max_bytes=len(body)) == body


def test_a_large_body_that_does_not_shrink_travels_as_it_is() -> None:
    body = os.urandom(COMPRESS_OVER_BYTES + 1)
    assert pack_body(body) == plain(body)


def test_the_middle_of_a_body_decides() -> None:
    noise = os.urandom(300_000)
    assert pack_body(bytes(100_000) + noise + bytes(100_000)).encoding == ""


def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(size))


def without_size(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(body)


@pytest.mark.parametrize(
    "data", [b"", b"no frame at all", bomb(1001), bomb(50_000_000), bomb(1000)[:-1], without_size(b"a" * 100)]
)
def test_damaged_or_oversized_frames_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError, match="compressed body"):
        unpack_body(data, "zstd", max_bytes=1000)


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    data = bytearray(bomb(5000))
    at = bytes(data).index((5000 - 256).to_bytes(2, "little"))
    data[at : at + 2] = (500 - 256).to_bytes(2, "little")
    assert zstandard.frame_content_size(bytes(data)) == 500
    with pytest.raises(DecodeError):
        unpack_body(bytes(data), "zstd", max_bytes=1000)


@pytest.mark.parametrize("encoding", ["", "zstd"])
def test_a_body_of_exactly_the_limit_passes(encoding: str) -> None:
    body = b"a" * 1000
    data = body if encoding == "" else bomb(0) if not body else zstandard.ZstdCompressor().compress(body)
    assert unpack_body(data, encoding, max_bytes=1000) == body  # type: ignore[arg-type]


# ---- parts


@given(
    body=st.binary(max_size=400),
    part_bytes=st.integers(1, 90),
    seed=st.integers(0, 1000),
    duplicates=st.lists(st.integers(0, 400), max_size=5),
)
def test_parts_come_together_in_any_order_and_twice(
    body: bytes, part_bytes: int, seed: int, duplicates: list[int]
) -> None:
    packed = plain(body)
    parts = cut(packed, part_bytes)
    order = list(range(parts.parts)) + [index % parts.parts for index in duplicates]
    random.Random(seed).shuffle(order)
    assert assembled(packed, parts, order) == body


def test_a_compressed_body_comes_together() -> None:
    body = bytes(range(256)) * 4000
    packed = pack_body(body)
    parts = cut(packed, 500)
    assert (parts.encoding, parts.raw_size, parts.size) == ("zstd", len(body), len(packed.data))
    assert assembled(packed, parts, list(range(parts.parts))) == body


def test_an_empty_body_is_one_empty_part() -> None:
    parts = cut(plain(b""), 100)
    assert (parts.parts, parts.size) == (1, 0)
    assert assembled(plain(b""), parts, [0]) == b""


def test_there_is_no_part_beyond_the_last() -> None:
    parts = cut(plain(bytes(1000)), 300)
    assert len(part_of(bytes(1000), parts, 3)) == 100
    with pytest.raises(DecodeError, match="part 4"):
        part_of(bytes(1000), parts, 4)


def test_what_is_missing_is_counted_and_no_body_is_given() -> None:
    parts = cut(plain(bytes(1000)), 300)
    assembly = Assembly(parts, max_bytes=MIB)
    assembly.put(1, bytes(300))
    assembly.put(1, bytes(300))
    assert assembly.missing == 3
    with pytest.raises(DecodeError, match="3 of 4 parts are missing"):
        assembly.body()


@pytest.mark.parametrize(("index", "size"), [(0, 299), (0, 301), (3, 300), (3, 99), (4, 300), (4, 0), (10**9, 0)])
def test_a_part_of_the_wrong_size_or_place_is_refused(index: int, size: int) -> None:
    assembly = Assembly(announced(), max_bytes=MIB)
    with pytest.raises(DecodeError, match=f"part {index}"):
        assembly.put(index, bytes(size))
    assert assembly.missing == 4


def test_a_damaged_body_is_refused() -> None:
    parts = cut(plain(b"a" * 1000), 600)
    assembly = Assembly(parts, max_bytes=MIB)
    assembly.put(0, b"a" * 599 + b"b")
    assembly.put(1, b"a" * 400)
    with pytest.raises(DecodeError, match="checksum"):
        assembly.body()
    assembly.put(0, b"a" * 600)
    assert assembly.body() == b"a" * 1000


@pytest.mark.parametrize("parts", [announced(size=2000, parts=7), announced(raw_size=2000)])
def test_a_body_over_the_limit_is_refused_when_it_is_announced(parts: Parts) -> None:
    with pytest.raises(DecodeError, match="2,000 bytes, the limit is 1,500"):
        Assembly(parts, max_bytes=1500)


@pytest.mark.parametrize("changes", [{"parts": 3}, {"parts": 5}, {"part_bytes": 10}, {"size": 0}, {"parts": 10**12}])
def test_an_announcement_that_contradicts_itself_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(DecodeError, match="are not"):
        Assembly(announced(**changes), max_bytes=MIB)


def test_a_compressed_body_may_not_grow_beyond_the_limit_it_was_announced_under() -> None:
    data = bomb(50_000)
    parts = cut(Packed(data, "zstd", 100), 1000)
    with pytest.raises(DecodeError, match="50,000"):
        assembled(Packed(data, "zstd", 100), parts, [0], max_bytes=1000)
