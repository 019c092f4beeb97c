"""Keys from a terminal, one by one and without echo; the terminal is as before afterwards, however it ends."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Self

_NAMES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}


class Keyboard:
    """Reads keys of standard input while it is entered; needs a running loop."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno()
        self._keys: asyncio.Queue[str] = asyncio.Queue(maxsize=64)
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd, termios.TCSANOW)
        mode = termios.tcgetattr(self._fd)
        mode[6][termios.VSUSP] = b"\0"  # a Ctrl-Z would leave the screen as it is drawn
        termios.tcsetattr(self._fd, termios.TCSANOW, mode)
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        self.restore()

    def restore(self) -> None:
        """Give the terminal its settings back; safe at any time."""
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)

    async def key(self) -> str:
        """The next key: a character, ``up``, ``down``, or ``end`` when the terminal has gone."""
        return await self._keys.get()

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 256)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            keys = ["end"]
        else:
            keys = split_keys(data)
        for key in keys:
            if not self._keys.full():
                self._keys.put_nowait(key)


def split_keys(data: bytes) -> list[str]:
    """The keys in what a terminal sent at once; sequences that mean nothing here are dropped."""
    keys: list[str] = []
    while data:
        name = next((sequence for sequence in _NAMES if data.startswith(sequence)), None)
        if name is not None:
            keys.append(_NAMES[name])
            data = data[len(name) :]
        elif data[:1] == b"\x1b":
            break
        else:
            keys.append(chr(data[0]))
            data = data[1:]
    return keys
