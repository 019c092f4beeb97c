"""A client process of a chaos run: makes calls until told to stop, and writes down how each began and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import chaos_ledger as ledger
from chaos_calls import GIVE_UP_S, WEIGHTS, Caller
from chaos_orders import Orders, write_vitals

from envbus import ClientSettings, NATSEnvClient
from envbus.logs import setup_logging

POLL_S = 0.05


class Client:
    """One incarnation of a client; its calls are named after its process id.

    Args:
        spec: ``url``, ``prefix``, ``name``, ``seed``, ``workers``, ``settings``.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._folder = ledger.run_folder()
        self._numbers = itertools.count()
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leaving.set)
        options = {"name": "chaos", "prefix": self._spec["prefix"]}
        options["settings"] = ClientSettings(**self._spec["settings"])
        url = self._spec["url"]
        self._clients = [NATSEnvClient(url, **options), NATSEnvClient(url, timeout_s=GIVE_UP_S, **options)]
        self._caller = Caller(*self._clients, random.Random(self._spec["seed"]), self._folder)
        self._orders = Orders(self._folder, loop, self._tables)
        self._orders.start()
        ledger.write(self._folder, ledger.PROCESSES, event="born", role="client", name=self._spec["name"])
        work = asyncio.create_task(self._work())
        left = asyncio.create_task(self._leaving.wait())
        await asyncio.wait([work, left], return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        for client in self._clients:
            await client.close()
        await work

    async def _work(self) -> None:
        for kind in WEIGHTS:
            await self._one(kind)
        write_vitals(self._folder, "base", self._tables())
        ledger.write(self._folder, ledger.PROCESSES, event="warm", role="client", name=self._spec["name"])
        await self._until((self._folder / "go").exists)
        await asyncio.gather(*(self._stream() for _ in range(self._spec["workers"])))
        ledger.write(self._folder, ledger.PROCESSES, event="quiet", role="client", name=self._spec["name"])
        await self._until(self._orders.leave.is_set)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not (condition() or self._leaving.is_set()):  # noqa: ASYNC110 - files and threads set no asyncio.Event
            await asyncio.sleep(POLL_S)

    async def _stream(self) -> None:
        while not (self._orders.quit.is_set() or self._leaving.is_set()):
            await self._one(self._caller.draw())

    async def _one(self, kind: str) -> None:
        if self._leaving.is_set():
            return
        key = f"{os.getpid()}-{next(self._numbers)}"
        ledger.write(self._folder, ledger.CALLS, event="begin", call=key, kind=kind)
        outcome = await self._outcome(kind, key)
        ledger.write(self._folder, ledger.CALLS, event="end", call=key, **outcome)
        if outcome["outcome"] not in ("result", "cancelled"):
            await asyncio.sleep(0.05)

    async def _outcome(self, kind: str, key: str) -> dict[str, Any]:
        try:
            return {"outcome": "result", "right": await self._caller.call(kind, key)}
        except asyncio.CancelledError:
            return {"outcome": "cancelled"}
        except Exception as error:  # noqa: BLE001 - whatever it is, the ledger shall say so
            return {"outcome": type(error).__name__, "error": str(error)[:500]}

    def _tables(self) -> dict[str, int]:
        """What the sessions still hold; read from another thread, so roughly."""
        sessions = [client._session for client in self._clients if client._session is not None]
        return {
            "jobs": sum(len(session._jobs) for session in sessions),
            "pending": sum(len(session._dispatch.pending()) for session in sessions),
            "attempts": sum(len(session._attempts) for session in sessions),
            "holders": sum(len(session._attempts.holders()) for session in sessions),
        }


async def main() -> None:
    spec = json.loads(sys.argv[1])
    setup_logging("INFO", log_file=spec["log_file"])
    with contextlib.suppress(FileNotFoundError):
        await Client(spec).run()


if __name__ == "__main__":
    asyncio.run(main())
