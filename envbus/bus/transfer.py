"""Bodies on the wire: compressed when it pays, cut into parts, checked and put together again."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import zstandard

from envbus.bus.messages import Encoding, Parts
from envbus.errors import DecodeError

COMPRESS_OVER_BYTES = 256 * 1024
"""Smaller bodies cost more to compress than to send."""
_SAMPLE_BYTES = 64 * 1024
_PAYS_BELOW = 0.6
"""Compressed to original size of a sample, over which compression is left out."""
_LEVEL = 1
MAX_PARTS = 2**20
"""Of one body. Many tiny ones would take far more memory than the bytes in them."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A body as it travels.

    Attributes:
        checksum: CRC-32 of ``data``, from the thread that made it: for a large body it takes a while.
    """

    data: bytes
    encoding: Encoding
    raw_size: int
    checksum: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksum", zlib.crc32(self.data))


def pack_body(body: bytes, *, compress: bool = True) -> Packed:
    """Compress a body if it may be, is large, and a sample from its middle says that it pays."""
    if compress and len(body) > COMPRESS_OVER_BYTES:
        middle = len(body) // 2
        sample = body[middle : middle + _SAMPLE_BYTES]
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        if len(compressor.compress(sample)) < _PAYS_BELOW * len(sample):
            # Copied: zstandard leaves it in a buffer for the worst case, larger than the body.
            return Packed(bytes(memoryview(compressor.compress(body))), "zstd", len(body))
    return Packed(body, "", len(body))


def unpack_body(data: bytes, encoding: Encoding, *, max_bytes: int) -> bytes:
    """Return the body that was packed.

    Raises:
        DecodeError: It is damaged, or larger than ``max_bytes``.
    """
    if encoding == "":
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise DecodeError(f"compressed body states {size:,} bytes, the limit is {max_bytes:,}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes)
    except zstandard.ZstdError as error:
        raise DecodeError(f"compressed body is damaged: {error}") from error


def unpacked_bytes(data: bytes, encoding: Encoding) -> int:
    """Return how large a packed body says it is; what it travels as if it does not say so."""
    if encoding == "":
        return len(data)
    try:
        return max(len(data), int(zstandard.frame_content_size(data)))
    except zstandard.ZstdError:
        return len(data)


def cut(packed: Packed, part_bytes: int) -> Parts:
    """Describe how a body travels in parts."""
    size = len(packed.data)
    return Parts(
        size=size,
        parts=max(1, -(-size // part_bytes)),
        part_bytes=part_bytes,
        checksum=packed.checksum,
        encoding=packed.encoding,
        raw_size=packed.raw_size,
    )


def part_of(data: bytes, parts: Parts, index: int) -> bytes:
    """Return one part's bytes.

    Raises:
        DecodeError: There is no such part.
    """
    if index >= parts.parts:
        raise DecodeError(f"part {index} asked for, there are {parts.parts}")
    return data[index * parts.part_bytes : (index + 1) * parts.part_bytes]


class Assembly:
    """A body that arrives part by part, in any order, some perhaps twice.

    Args:
        parts: As announced.
        max_bytes: Refuse more than this, travelling or unpacked.

    Raises:
        DecodeError: The announcement contradicts itself or is over the limit.
    """

    def __init__(self, parts: Parts, *, max_bytes: int) -> None:
        if max(parts.size, parts.raw_size) > max_bytes:
            raise DecodeError(f"body of {max(parts.size, parts.raw_size):,} bytes, the limit is {max_bytes:,}")
        if parts.parts != max(1, -(-parts.size // parts.part_bytes)):
            raise DecodeError(f"{parts.size} bytes in parts of {parts.part_bytes} are not {parts.parts} parts")
        if parts.parts > MAX_PARTS:
            raise DecodeError(f"{parts.parts:,} parts, the limit is {MAX_PARTS:,}")
        self.parts = parts
        self._max_bytes = max_bytes
        # Parts are kept as they come: what a stranger announces costs no memory before it arrives.
        self._parts: dict[int, bytes] = {}

    @property
    def missing(self) -> int:
        """Parts that are not here yet."""
        return self.parts.parts - len(self._parts)

    def put(self, index: int, data: bytes) -> None:
        """Take in one part.

        Raises:
            DecodeError: There is no such part, or it has the wrong size.
        """
        start = index * self.parts.part_bytes
        size = min(self.parts.part_bytes, self.parts.size - start)
        if index >= self.parts.parts or len(data) != size:
            raise DecodeError(f"part {index} has {len(data)} bytes, expected {max(size, 0)}")
        self._parts[index] = data

    def packed(self) -> Packed:
        """Return the whole body, checked.

        Raises:
            DecodeError: Parts are missing, or the checksum differs.
        """
        if self.missing:
            raise DecodeError(f"{self.missing} of {self.parts.parts} parts are missing")
        whole = b"".join([self._parts[index] for index in range(self.parts.parts)])
        packed = Packed(whole, self.parts.encoding, self.parts.raw_size)
        if packed.checksum != self.parts.checksum:
            raise DecodeError("the body's checksum differs from the announced one")
        return packed

    def body(self) -> bytes:
        """Return the whole body, checked and decompressed.

        Raises:
            DecodeError: Parts are missing, the checksum differs, or it is damaged.
        """
        packed = self.packed()
        return unpack_body(packed.data, packed.encoding, max_bytes=self._max_bytes)
