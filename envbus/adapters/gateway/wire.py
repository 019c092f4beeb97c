"""Maps of the library's protocols as bytes and back: plain msgpack, bounded where bytes come from strangers (pure).

Not the bus's codec: its extensions are not read by the library's clients, and keys that are no texts are refused there.
"""

from __future__ import annotations

from typing import Any

import msgpack

from envbus.errors import BadRequestError


def unpack_map(data: bytes) -> dict[Any, Any]:
    """The map that bytes from anyone hold.

    Raises:
        BadRequestError: They hold none.
    """
    try:
        _check_framing(data)
        value = msgpack.unpackb(data, raw=False, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError, msgpack.UnpackException) as error:
        raise BadRequestError(f"not a msgpack map: {str(error)[:200] or type(error).__name__}") from error
    if not isinstance(value, dict):
        raise BadRequestError(f"a msgpack map is expected, not {type(value).__name__}")
    return value


def pack(value: Any) -> bytes:
    """Bytes of what came over the bus.

    Raises:
        OverflowError: An integer of more than 64 bits; ValueError and TypeError: what msgpack cannot carry.
    """
    data: bytes = msgpack.packb(value, default=_as_list, use_bin_type=True, unicode_errors="backslashreplace")
    return data


def _as_list(value: Any) -> Any:
    """An array, which only the bus has a form for, as a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _check_framing(data: bytes) -> None:
    """Skip through them, building nothing: a few bytes may declare millions of elements that never come."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    unpacker.skip()
    if unpacker.tell() != len(data):
        raise ValueError("more bytes follow it")
