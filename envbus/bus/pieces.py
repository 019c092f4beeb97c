"""Packs a frozen value piece by piece: no call of C code holds the interpreter for long, so other threads go on.

The bytes are the same as if msgpack had packed all of it in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

from envbus.bus.extensions import (
    NDARRAY,
    PACKED_LIST,
    array_head,
    extension_head,
    pack_foreign,
    packed_numbers,
)
from envbus.bus.frozen import Frozen, LongList

_ARRAY_PIECE_BYTES = 2**20


def pack_in_pieces(frozen: Frozen, *, unicode_errors: str | None = None) -> bytes:
    """Return the value as bytes.

    Raises:
        UnicodeEncodeError: A lone surrogate, unless ``unicode_errors`` says what to do.
        OverflowError: An integer that is too long.
        ValueError: More than msgpack can carry.
        EncodeError: What a long list turned out to hold is refused.
    """
    packer = msgpack.Packer(default=pack_foreign, unicode_errors=unicode_errors)
    if not frozen.large and not frozen.long_lists:
        packed: bytes = packer.pack(frozen.tree)
        return packed
    return b"".join(list(_pieces(frozen.tree, frozen.large, packer)))


def _pieces(value: Any, large: set[int], packer: Any) -> Iterator[bytes]:
    if type(value) is LongList:
        yield from _long_list(value, packer)
    elif id(value) not in large:
        yield packer.pack(value)
    elif type(value) is dict:
        yield packer.pack_map_header(len(value))
        for key, item in value.items():
            yield packer.pack(key)
            yield from _pieces(item, large, packer)
    elif type(value) is list:
        yield packer.pack_array_header(len(value))
        for item in value:
            yield from _pieces(item, large, packer)
    else:
        yield from _array(value)


def _long_list(long_list: LongList, packer: Any) -> Iterator[bytes]:
    numbers = packed_numbers(long_list.chunks)
    if numbers is not None:
        yield extension_head(PACKED_LIST, sum(map(len, numbers)))
        yield from numbers
        return
    chunks = long_list.plain_chunks()
    yield packer.pack_array_header(len(long_list))
    for chunk in chunks:
        yield b"".join(list(map(packer.pack, chunk)))


def _array(array: Any) -> Iterator[bytes]:
    head, elements = array_head(array), memoryview(array).cast("B")
    yield extension_head(NDARRAY, len(head) + len(elements)) + head
    for start in range(0, len(elements), _ARRAY_PIECE_BYTES):
        yield bytes(elements[start : start + _ARRAY_PIECE_BYTES])
