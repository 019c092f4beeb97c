"""The msgpack extension types of envbus: numpy array (1), big integer (2), packed list of numbers (3).

Owns their bytes (docs/protocol.md, "Values"). Whatever comes in is validated before it is used.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
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

_CHUNK = 2**15
"""Elements handled in one call of C code that holds the GIL: about a millisecond."""
_INT_CODES = ("b", "i", "q")
_ITEM_BYTES = {"b": 1, "i": 4, "q": 8, "d": 8}


def pack_foreign(value: Any) -> msgpack.ExtType:
    """The packer's ``default``: carries what plain data holds besides msgpack's own types.

    Raises:
        OverflowError: An integer over MAX_INT_BYTES.
    """
    if isinstance(value, int):
        return msgpack.ExtType(BIG_INT, _int_bytes(value))
    dtype = value.dtype.name.encode()
    head = struct.pack(f"<B{len(dtype)}sB{value.ndim}Q", len(dtype), dtype, value.ndim, *value.shape)
    return msgpack.ExtType(NDARRAY, b"".join((head, value.data)))


def shrink_list(items: list[Any] | tuple[Any, ...]) -> msgpack.ExtType | None:
    """Return a long list of only ints or only floats as a packed list, None for any other."""
    if len(items) < PACKED_LIST_MIN:
        return None
    kind = type(items[0])
    for code in ("d",) if kind is float else _INT_CODES if kind is int else ():
        try:
            parts = [_packed(code, kind, items[start : start + _CHUNK]) for start in range(0, len(items), _CHUNK)]
        except OverflowError:
            continue
        except TypeError:
            return None
        return msgpack.ExtType(PACKED_LIST, b"".join((code.encode(), *parts)))
    return None


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


def _packed(code: str, kind: type[int] | type[float], items: list[Any] | tuple[Any, ...]) -> bytes:
    if set(map(type, items)) != {kind}:
        raise TypeError("not all of one type")
    return _little_endian(array(code, items)).tobytes()


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
