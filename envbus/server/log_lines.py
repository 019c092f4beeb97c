"""Reads lines of a growing log file: the last ones, or those after an offset. Bounded in bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from envbus.bus.control_messages import LogLines, LogsRequest
from envbus.errors import BadRequestError

MAX_BYTES = 256 * 1024
"""Read at a time; a longer line is cut into pieces."""


async def answer_logs(request: LogsRequest, *, server: str, log_file: Path | str, max_payload: int) -> LogLines:
    """Return what was asked for, as it fits on one message; read on another thread.

    Raises:
        BadRequestError: The file cannot be read.
    """
    max_bytes = min(MAX_BYTES, max_payload // 4)  # a byte that is no text becomes three
    try:
        lines, following = await asyncio.to_thread(
            read_log, log_file, lines=request.lines, after=request.after, max_bytes=max_bytes
        )
    except OSError as error:
        raise BadRequestError(f"cannot read the log file {log_file}: {error.strerror}") from error
    return LogLines(server=server, lines=lines, next=following)


def read_log(
    path: Path | str, *, lines: int, after: int | None = None, max_bytes: int = MAX_BYTES
) -> tuple[list[str], int]:
    """Return whole lines, and the offset of what comes after them. Blocks on the disk.

    Args:
        path: The file.
        lines: At most so many: the last ones, or with ``after`` the first ones from there.
        after: Byte offset to go on from. Past the end, the file was replaced: it is read from its start.
        max_bytes: Read at most so much.

    Raises:
        OSError: The file cannot be read.
    """
    with Path(path).open("rb") as file:
        size = file.seek(0, 2)
        start = _start(size, after, max_bytes)
        file.seek(start)
        whole = _whole_lines(file.read(max_bytes), max_bytes)
    if after is None:
        first = 1 if start > 0 and len(whole) > 1 else 0  # it begins somewhere in a line
        shown, end = whole[first:][-lines:], start + sum(map(len, whole))
    else:
        shown = whole[:lines]
        end = start + sum(map(len, shown))
    return [line.rstrip(b"\r\n").decode("utf-8", "replace") for line in shown], end


def _start(size: int, after: int | None, max_bytes: int) -> int:
    if after is None:
        return max(0, size - max_bytes)
    return after if after <= size else 0


def _whole_lines(data: bytes, max_bytes: int) -> list[bytes]:
    """Lines with their ends; a last one that is not complete is left for later, unless it fills the buffer."""
    *whole, rest = data.split(b"\n")
    lines = [line + b"\n" for line in whole]
    return lines if lines or len(rest) < max_bytes else [rest]
