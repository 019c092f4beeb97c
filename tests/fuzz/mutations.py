"""Makes wrong bytes of right ones: a plain mutation fuzzer, the same for the same seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import zstandard

EXTREMES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    float("nan"),
    float("-inf"),
    1e308,
    "",
    "x" * 70_000,
    "a\n\x00b",
    "\ud800",
    "..",
    "a.b >*",
    b"\xff\x00",
    [],
    [1] * 20_000,
    [[[]]],
    {},
    {"": {"": None}},
    {str(n): n for n in range(2_000)},
    msgpack.ExtType(2, b"\x7f" * 1024),
    msgpack.ExtType(1, b"\x04int8\x01" + struct.pack("<Q", 5) + bytes(5)),
    msgpack.ExtType(3, b"q" + bytes(80)),
    msgpack.ExtType(77, b"?"),
)
"""What takes a field's place: each kind, at its ends."""
_LENGTHS = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x01\x00\x00")


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def mutated(data: bytes, corpus: Sequence[bytes], rng: random.Random) -> bytes:
    """Return the bytes after 1 to 4 random changes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        rng.choice(_CHANGES)(changed, corpus, rng)
    return bytes(changed)


def _flip(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0x80, 0x90, 0xC1, 0xC7, 0xC9, 0xDB, 0xDD, 0xDF, 0xFF))


def _truncate(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _splice(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    other = rng.choice(corpus)
    start, at = rng.randrange(len(other) + 1), rng.randrange(len(data) + 1)
    data[at : at + rng.randrange(16)] = other[start : start + rng.randrange(64)]


def _length(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + 4] = rng.choice(_LENGTHS)


def _repeat(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[at : at + rng.randint(1, 8)] * rng.choice((2, 100, 3_000))


def _insert(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice((packed(rng.choice(EXTREMES[:-10])), rng.randbytes(rng.randrange(16))))


_CHANGES: tuple[Callable[[bytearray, Sequence[bytes], random.Random], None], ...] = (
    _flip,
    _flip,
    _set,
    _truncate,
    _splice,
    _length,
    _repeat,
    _insert,
)


def bombs() -> dict[str, bytes]:
    """Small bytes that ask for much: memory, stack or time."""
    header = b"\x04int8\x02" + struct.pack("<QQ", 2**40, 2**40)
    flat = zstandard.ZstdCompressor().compress(bytes(64 * 2**20))
    claims = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**62) + b"\x01\x00\x00"
    return {
        "deep lists": b"\x91" * 200_000 + b"\xc0",
        "deep maps": b"\x81\xa1a" * 200_000 + b"\xc0",
        "nested headers": (b"\xdd" + struct.pack(">I", 900_000)) * 500 + bytes(1000),
        "map of 4 G": b"\xdf\xff\xff\xff\xff",
        "str of 4 GiB": b"\xdb\xff\xff\xff\xff" + bytes(100),
        "bin of 4 GiB": b"\xc6\xff\xff\xff\xff",
        "ext of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
        "array of 2^80": packed(msgpack.ExtType(1, header)),
        "many small exts": b"\xdd" + struct.pack(">I", 50_000) + packed(msgpack.ExtType(3, b"b")) * 50_000,
        "empty arrays": b"\xdd"
        + struct.pack(">I", 6_000)
        + packed(msgpack.ExtType(1, b"\x04int8\x01" + bytes(8))) * 6_000,
        "zeros": flat,
        "claims 4 EiB": claims,
    }


def wrong_messages(valid: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield ``(what is wrong, bytes)`` of a message with one thing wrong at a time, each field in turn."""
    for name in valid:
        yield f"{name} dropped", packed({key: value for key, value in valid.items() if key != name})
        for number, extreme in enumerate(EXTREMES):
            yield f"{name} = extreme {number}", packed(valid | {name: extreme})
        if isinstance(valid[name], dict):
            for what, inner in _wrong_parts(valid[name]):
                yield f"{name}.{what}", packed(valid | {name: inner})
    yield "unknown kind", packed(valid | {"t": "no_such_kind"})
    yield "higher protocol", packed(valid | {"v": 2})
    yield "twice", packed(valid) * 2
    yield "nothing", b""


def _wrong_parts(valid: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in valid:
        yield f"{name} dropped", {key: value for key, value in valid.items() if key != name}
        for number, extreme in enumerate(EXTREMES):
            yield f"{name} = extreme {number}", valid | {name: extreme}
