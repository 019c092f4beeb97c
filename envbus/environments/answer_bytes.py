"""Bytes of a model's answer on their way in: unpacked piece by piece, credentials of the request taken out."""

from __future__ import annotations

import html
import json
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from urllib.parse import quote

from envbus.errors import InvalidModelResponseError

MASK = b"[redacted]"
MIN_SECRET_CHARS = 8
"""What is shorter is a placeholder, and a word that answers may hold."""
_PIECE_BYTES = 256 * 1024


class Secrets:
    """Values that must not be in an answer.

    Args:
        values: Those of the request's credentials; short ones are passed over.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values if len(value) >= MIN_SECRET_CHARS for form in _forms(value)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._longest = max(map(len, self._forms), default=0)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def are_in(self, text: str) -> bool:
        """Whether one of them is in a text."""
        return any(form.decode() in text for form in self._forms)

    def masked(self, body: bytes) -> bytes:
        """The bytes without them."""
        for form in self._forms:
            body = body.replace(form, MASK)
        return body

    async def taken_out(self, pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """The pieces without them, even where they cross from one piece to the next."""
        held = b""
        async for piece in pieces:
            body = self.masked(held + piece)
            begun = self._begun(body)
            held = body[len(body) - begun :]
            if len(body) > begun:
                yield body[: len(body) - begun]
        if held:
            yield held

    def _begun(self, body: bytes) -> int:
        """How many bytes at the end may be the beginning of one."""
        for count in range(min(self._longest - 1, len(body)), 0, -1):
            if any(form.startswith(body[-count:]) for form in self._forms):
                return count
        return 0


def _forms(value: str) -> Iterable[bytes]:
    escaped = json.dumps(value)[1:-1]
    as_go_does = escaped
    for sign in "&<>":
        as_go_does = as_go_does.replace(sign, f"\\u{ord(sign):04x}")
    yield from (escaped.encode(), escaped.replace("/", "\\/").encode(), as_go_does.encode())
    for form in (value, quote(value, safe=""), quote(value), html.escape(value, quote=False), html.escape(value)):
        yield form.encode()


async def unpacked(pieces: AsyncIterable[bytes], encoding: str) -> AsyncIterator[bytes]:
    """The pieces unpacked, none larger than a bound.

    Raises:
        InvalidModelResponseError: They are not gzip or deflate, whichever is said, or end in the middle.
    """
    unpacker = zlib.decompressobj(wbits=47)  # gzip or deflate, whichever it is
    is_empty = True
    async for piece in pieces:
        is_empty = is_empty and not piece
        while True:
            body = _decompress(unpacker, piece, encoding)
            piece = unpacker.unconsumed_tail
            if body:
                yield body
            if unpacker.eof:
                return  # what follows is no part of it
            if not piece and len(body) < _PIECE_BYTES:
                break
    if not is_empty:
        raise InvalidModelResponseError(f"the endpoint's answer ends in the middle of its {encoding}")


def _decompress(unpacker: zlib._Decompress, piece: bytes, encoding: str) -> bytes:
    try:
        return unpacker.decompress(piece, _PIECE_BYTES)
    except zlib.error as error:
        raise InvalidModelResponseError(f"the endpoint's answer is not {encoding}: {error}") from error
