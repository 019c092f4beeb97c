"""Carries out, inside a server or client of a chaos run, what the run orders: from a thread, by a file.

The product knows nothing of it: a clock that jumps, a loop that blocks, a call that
holds the GIL, and files on a full disk are made from outside of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chaos_ledger as ledger
import psutil

POLL_S = 0.05
_real_time = time.time


class Orders:
    """Follows the file of orders; see ``_carry_out`` for what there is.

    Args:
        loop: The loop that an order to block blocks.
        tables: What else to report of this process.
    """

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop, tables: Callable[[], dict[str, int]]) -> None:
        self._folder = folder
        self._loop = loop
        self._tables = tables
        self._file = folder / f"{ledger.ORDERS}.jsonl"
        self._read_bytes = self._file.stat().st_size if self._file.exists() else 0
        self.leave = threading.Event()
        self.quit = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="chaos-orders", daemon=True).start()

    def _follow(self) -> None:
        while True:
            time.sleep(POLL_S)
            for order in self._new():
                if order["to"] == os.getpid():
                    self._carry_out(order)

    def _new(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
            self._read_bytes += len(whole) + 1 if whole else 0
            return [json.loads(line) for line in whole.splitlines()]
        return []

    def _carry_out(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "clock":
                jump_clock(order["amount"], order["for_s"])
            case "block":
                self._loop.call_soon_threadsafe(time.sleep, order["for_s"])
            case "gil":
                hold_gil(order["for_s"])
            case "disk-full":
                threading.Thread(target=fill_disk, args=(self._folder, order["for_s"]), daemon=True).start()
            case "vitals":
                write_vitals(self._folder, order["tag"], self._tables())
            case "quit":
                self.quit.set()
            case "leave":
                self.leave.set()


def jump_clock(by_s: float, for_s: float) -> None:
    """Let the wall clock be wrong for a while, in this process."""

    def wrong_time() -> float:
        return _real_time() + by_s

    def back() -> None:
        time.time = _real_time

    time.time = wrong_time
    timer = threading.Timer(for_s, back)
    timer.daemon = True
    timer.start()


def hold_gil(for_s: float) -> None:
    """Sleep in C without letting go of the interpreter's lock, as some libraries compute."""
    ctypes.PyDLL(None).usleep(int(for_s * 1e6))


def fill_disk(folder: Path, for_s: float) -> None:
    """Let each write to this process's logs and results fail for want of room."""
    with open("/dev/full", "wb", buffering=0) as full:
        kept = {fd: os.dup(fd) for fd in _files_of(folder)}
        for fd in kept:
            os.dup2(full.fileno(), fd, inheritable=fd <= 2)
        time.sleep(for_s)
        for fd, real in kept.items():
            if _link(fd) == "/dev/full":  # else it was closed meanwhile, and the number is another file's
                os.dup2(real, fd, inheritable=fd <= 2)
            os.close(real)


def _files_of(folder: Path) -> list[int]:
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    return [fd for fd in fds if _link(fd).startswith(str(folder)) and _link(fd).endswith((".log", "results.jsonl"))]


def _link(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        if error.errno == errno.ENOENT:
            return ""
        raise


def write_vitals(folder: Path, tag: str, tables: dict[str, int]) -> None:
    """Report what this process holds: tasks, threads, descriptors, memory."""
    gc.collect()
    loops = [item for item in gc.get_objects() if isinstance(item, asyncio.AbstractEventLoop) and not item.is_closed()]
    me = psutil.Process()
    ledger.write(
        folder,
        ledger.VITALS,
        tag=tag,
        tasks=sum(len(asyncio.all_tasks(loop)) for loop in loops),
        threads=me.num_threads(),
        fds=me.num_fds(),
        rss=me.memory_info().rss,
        tables=tables,
    )
