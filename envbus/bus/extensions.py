"""The msgpack extension types of envbus: numpy array (1), big integer (2), packed list of numbers (3).

Owns their bytes (docs/protocol.md, "Values"). Whatever comes in is validated before it is used.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import countOf
from typing import Any

import msgpack

from envbus.bus.foreign import ARRAY_DTYPES, MAX_ARRAY_DIMS, MAX_EMPTY_EXTENT
from envbus.errors import DecodeError

NDARRAY = 1
"""u8 length and ASCII name of the dtype, u8 number of dimensions, each as u64, then the elements in C order.

All little-endian. Decoded to a writable numpy array.
"""
BIG_INT = 2
"""Two's complement, little-endian, at most MAX_INT_BYTES."""
PACKED_LIST = 3
"""One ASCII type code (``b`` int8, ``i`` int32, ``q`` int64, ``d`` float64), then the elements, little-endian."""

MAX_INT_BYTES = 1024
"""Keeps ``str()`` of a decoded integer below Python's limit on digits."""
PACKED_LIST_MIN = 4096
"""Lists of ints or floats of this length and more travel packed: several times faster to decode."""

_CHUNK = 2**13
"""Elements handled in one call of C code that holds the GIL: less than a millisecond."""
_CODES: dict[type, tuple[str, ...]] = {int: ("b", "i", "q"), float: ("d",)}
_ITEM_BYTES = {"b": 1, "i": 4, "q": 8, "d": 8}


def pack_foreign(value: Any) -> msgpack.ExtType:
    """The packer's ``default``: carries what plain data holds besides msgpack's own types.

    Raises:
        OverflowError: An integer over MAX_INT_BYTES.
    """
    if isinstance(value, int):
        return msgpack.ExtType(BIG_INT, _int_bytes(value))
    return msgpack.ExtType(NDARRAY, b"".join((array_head(value), value.data)))


def packed_numbers(chunks: Callable[[], Iterable[Sequence[Any]]]) -> list[bytes] | None:
    """Return a list of only ints or only floats as the content of a packed list, in pieces; None for any other.

    Args:
        chunks: Returns the list's items, chunk by chunk; may be called again.
    """
    kind = type(next(iter(chunks()))[0])
    for code in _CODES.get(kind, ()):
        try:
            return [code.encode(), *(_packed(code, kind, chunk) for chunk in chunks())]
        except struct.error:  # out of range
            continue
        except TypeError:
            return None
    return None


def in_chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cut a list so that no call of C code for a chunk holds the interpreter for a millisecond."""
    return (items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK))


def _packed(code: str, kind: type, chunk: Sequence[Any]) -> bytes:
    if countOf(map(type, chunk), kind) != len(chunk):
        raise TypeError("not all of one type")
    return struct.pack(f"<{len(chunk)}{code}", *chunk)


def extension_head(code: int, size_bytes: int) -> bytes:
    """Return what msgpack writes before the content of an extension of 256 bytes and more.

    Raises:
        ValueError: More than msgpack can carry.
    """
    if size_bytes >= 2**32:
        raise ValueError(f"an extension of {size_bytes:,} bytes")
    if size_bytes >= 2**16:
        return struct.pack(">BIb", 0xC9, size_bytes, code)
    return struct.pack(">BHb", 0xC8, size_bytes, code)


def array_head(array: Any) -> bytes:
    """Return what comes before the elements of an array."""
    dtype = array.dtype.name.encode()
    return struct.pack(f"<B{len(dtype)}sB{array.ndim}Q", len(dtype), dtype, array.ndim, *array.shape)


def unpack_extension(code: int, data: bytes) -> Any:
    """The unpacker's ``ext_hook``.

    Raises:
        DecodeError: Not one of ours, or malformed.
    """
    if code == NDARRAY:
        return _ndarray(data)
    if code == BIG_INT:
        if not 1 <= len(data) <= MAX_INT_BYTES:
            raise DecodeError(f"big integer of {len(data):,} bytes")
        return int.from_bytes(data, "little", signed=True)
    if code == PACKED_LIST:
        return _packed_list(data)
    raise DecodeError(f"unknown extension type {code}")


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(min(value.bit_length() // 8 + 1, MAX_INT_BYTES), "little", signed=True)


def _packed_list(data: bytes) -> list[Any]:
    code = chr(data[0]) if data else ""
    item_bytes = _ITEM_BYTES.get(code)
    if item_bytes is None or (len(data) - 1) % item_bytes:
        raise DecodeError("malformed packed list")
    numbers: list[Any] = []
    for start in range(1, len(data), _CHUNK * item_bytes):
        part = array(code, data[start : start + _CHUNK * item_bytes])
        numbers += _little_endian(part).tolist()
    return numbers


def _little_endian(numbers: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _ndarray(data: bytes) -> Any:
    try:
        (name_bytes,) = struct.unpack_from("<B", data)
        name_raw, dims = struct.unpack_from(f"<{name_bytes}sB", data, 1)
        name = name_raw.decode("ascii")
        shape = struct.unpack_from(f"<{min(dims, MAX_ARRAY_DIMS)}Q", data, 2 + name_bytes)
    except (struct.error, UnicodeDecodeError):
        raise DecodeError("malformed array header") from None
    if dims > MAX_ARRAY_DIMS or name not in ARRAY_DTYPES:
        raise DecodeError("array of a dtype or with dimensions that are not allowed")
    return _array_of(name, shape, memoryview(data)[2 + name_bytes + 8 * dims :])


def _array_of(name: str, shape: tuple[int, ...], elements: memoryview) -> Any:
    try:
        import numpy
    except ImportError:
        raise DecodeError("an array arrived, and numpy is not installed here") from None
    dtype = numpy.dtype(name).newbyteorder("<")
    size = math.prod(shape)
    if size * dtype.itemsize != len(elements) or math.prod(dim or 1 for dim in shape) > max(size, MAX_EMPTY_EXTENT):
        raise DecodeError("array whose shape does not fit its bytes")
    return numpy.frombuffer(bytearray(elements), dtype).reshape(shape)  # a bytearray, so that the array is writable
