"""Values to bytes and back: msgpack with limits, for bytes from strangers.

Invariant: what `encode` accepts, `decode` accepts under the same limits, and ``decode(encode(x)) == to_plain(x)``.
Failures are EncodeError (with the path to the value) and DecodeError, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import msgpack

from envbus.bus.extensions import MAX_INT_BYTES, unpack_extension
from envbus.bus.frozen import Frozen, LongList, freeze
from envbus.bus.pieces import pack_in_pieces
from envbus.bus.plain import CONTROL_LIMITS, DEFAULT_LIMITS, Limits, join_path, to_plain
from envbus.errors import DecodeError, EncodeError

__all__ = [
    "CONTROL_LIMITS",
    "DEFAULT_LIMITS",
    "Frozen",
    "Limits",
    "decode",
    "decode_map",
    "encode",
    "encode_frozen",
    "freeze",
    "to_plain",
]

_STR = frozenset({str})
_SHORT_LIST = 1024
_PIECE_BYTES = 2**16
"""Read in one call of C code, which holds the interpreter: a millisecond at most."""


def encode(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return any value as bytes.

    Raises:
        EncodeError: Over a limit, two keys that become one, or an integer over 1 KiB.
    """
    return encode_frozen(freeze(value, limits=limits), limits=limits)


def encode_frozen(frozen: Frozen, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return a frozen value as bytes; whatever its size, other threads go on meanwhile.

    Raises:
        EncodeError: As `encode`.
    """
    data = _pack(frozen)
    if len(data) > limits.max_bytes:
        raise EncodeError(f"{len(data):,} bytes, over the limit of {limits.max_bytes:,} bytes")
    return data


def decode(data: bytes | bytearray | memoryview, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Return the value that bytes from anyone hold.

    Duplicate keys are refused. msgpack's own timestamp, which `encode` never writes, reads as float seconds.

    Raises:
        DecodeError: Malformed, truncated, followed by more bytes, or over a limit.
    """
    size_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if size_bytes > limits.max_bytes:
        raise DecodeError(f"{size_bytes:,} bytes, over the limit of {limits.max_bytes:,} bytes")
    nodes = _Nodes(limits.max_nodes)
    try:
        _check_framing(data, size_bytes)
        value = _unpack(
            data,
            size_bytes,
            strict_map_key=True,
            unicode_errors="surrogatepass",
            object_pairs_hook=nodes.on_map,
            list_hook=nodes.on_list,
            ext_hook=nodes.on_extension,
            timestamp=1,
            max_array_len=size_bytes,
            max_map_len=limits.max_nodes,
        )
    except (ValueError, TypeError, OverflowError, MemoryError, msgpack.UnpackException) as exc:
        raise DecodeError(f"not a well-formed message: {str(exc)[:200] or type(exc).__name__}") from exc
    _check_depth(value, nodes=nodes.count, max_depth=limits.max_depth)
    return value


def decode_map(data: bytes | bytearray | memoryview, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Return the map that bytes from anyone hold.

    Raises:
        DecodeError: As `decode`, or the value is not a map.
    """
    value = decode(data, limits=limits)
    if type(value) is not dict:
        raise DecodeError(f"a map is expected, not {type(value).__name__}")
    return value


def _pack(frozen: Frozen) -> bytes:
    try:
        try:
            return pack_in_pieces(frozen)
        except UnicodeEncodeError:  # lone surrogates; this way is slower for all other strings
            return pack_in_pieces(frozen, unicode_errors="surrogatepass")
    except OverflowError:
        path = next(_paths(frozen.tree, _is_too_long), ())
        raise EncodeError(f"an integer of more than {MAX_INT_BYTES:,} bytes", path=join_path(path)) from None
    except (ValueError, MemoryError) as exc:
        raise EncodeError(f"too large for one message ({exc})") from exc


def _is_too_long(value: Any) -> bool:
    return type(value) is int and value.bit_length() >= 8 * MAX_INT_BYTES


def _paths(plain: Any, wanted: Callable[[Any], bool]) -> Iterator[tuple[str | int, ...]]:
    if wanted(plain):
        yield ()
    for key, item in _items(plain):
        for path in _paths(item, wanted):
            yield key, *path


def _items(plain: Any) -> Iterable[tuple[str | int, Any]]:
    if type(plain) is dict:
        return plain.items()
    if type(plain) is LongList:
        return enumerate(chain.from_iterable(plain.chunks()))
    return enumerate(plain) if type(plain) is list else ()


def _unpack(data: bytes | bytearray | memoryview, size_bytes: int, **options: Any) -> Any:
    """Unpack a message whose framing was checked."""
    if size_bytes <= _PIECE_BYTES:
        return msgpack.unpackb(data, **options)
    unpacker = msgpack.Unpacker(max_buffer_size=size_bytes, **options)
    return _fed(unpacker, data, size_bytes, unpacker.unpack)


def _fed(unpacker: Any, data: bytes | bytearray | memoryview, size_bytes: int, action: Callable[[], Any]) -> Any:
    """Feed an unpacker piece by piece until its action is through; between two pieces other threads get their turn.

    Raises:
        OutOfData: It is not through at the end.
    """
    view = memoryview(data)
    for start in range(0, max(size_bytes, 1), _PIECE_BYTES):
        unpacker.feed(view[start : start + _PIECE_BYTES])
        try:
            return action()
        except msgpack.OutOfData:
            if start + _PIECE_BYTES >= size_bytes:
                raise


def _check_framing(data: bytes | bytearray | memoryview, size_bytes: int) -> None:
    """Skip through the message, building nothing: afterwards every declared length is backed by bytes.

    Without it a few nested headers that each declare millions of elements make msgpack allocate all of them.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(size_bytes, 1))
    try:
        _fed(unpacker, data, size_bytes, unpacker.skip)
    except msgpack.OutOfData:
        raise DecodeError("not a well-formed message: it ends too early") from None
    if unpacker.tell() != size_bytes:
        raise DecodeError("not a well-formed message: more bytes follow it")


class _Nodes:
    """Counts containers and map entries as they are built, and refuses keys that we never write."""

    __slots__ = ("arrays", "count", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self.arrays = 0

    def _check(self) -> None:
        if self.count + self.arrays > self.limit:
            raise DecodeError(f"more than {self.limit:,} containers and keys")

    def on_extension(self, code: int, data: bytes) -> Any:
        value = unpack_extension(code, data)
        if type(value) is list:
            return self.on_list(value)
        if type(value) is not int:
            self.arrays += 1
            self._check()
        return value

    def on_list(self, items: list[Any]) -> list[Any]:
        self.count += 1
        self._check()
        return items

    def on_map(self, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        self.count += 1 + len(pairs)
        self._check()
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise DecodeError("a map has the same key twice")
        if not _STR.issuperset(map(type, fields)):
            raise DecodeError("a map has a key that is not a string")
        return fields


def _check_depth(value: Any, *, nodes: int, max_depth: int) -> None:
    """Refuse containers nested too deep.

    Every container is met once, so the search ends with the last of ``nodes``; long lists come last, because a long
    list is nearly always numbers and then is never looked through.
    """
    if nodes <= max_depth:
        return
    near: list[tuple[Any, int]] = [(value, 1)]
    long: list[tuple[Any, int]] = []
    nodes -= _node_count(value)
    while nodes > 0:
        container, depth = (near or long).pop()
        for child in container.values() if type(container) is dict else container:
            if type(child) is dict or type(child) is list:
                if depth >= max_depth:
                    raise DecodeError(f"nested deeper than {max_depth} levels")
                nodes -= _node_count(child)
                (near if len(child) < _SHORT_LIST else long).append((child, depth + 1))


def _node_count(container: list[Any] | dict[str, Any]) -> int:
    return 1 + len(container) if type(container) is dict else 1
