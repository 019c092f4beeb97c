"""An environment with pools that are stuck, a rubric with worker processes, and an open HTTP session."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import aiohttp

from envbus import Rubric, SingleTurnEnv, teardown


class PoolsEnv(SingleTurnEnv):
    def start_pools(self) -> None:
        self.threads, self.processes = ThreadPoolExecutor(1), ProcessPoolExecutor(1)
        self.threads.submit(threading.Event().wait)
        self.processes.submit(time.sleep, 600)

    async def setup_state(self, state: Any) -> None:
        state["session"] = self.session = aiohttp.ClientSession()

    @teardown
    async def leave(self) -> None:
        await self.session.close()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.processes.shutdown(wait=False, cancel_futures=True)
        print("pools torn down", os.getpid(), file=sys.stderr, flush=True)


class PoolRubric(Rubric):
    def __init__(self) -> None:
        super().__init__([self.scored_elsewhere])
        self.workers = ProcessPoolExecutor(2)

    async def scored_elsewhere(self, completion: Any) -> float:
        pid = await asyncio.get_running_loop().run_in_executor(self.workers, os.getpid)
        return float(pid != os.getpid())

    @teardown
    def leave(self) -> None:
        self.workers.shutdown(wait=False)


def load_environment() -> PoolsEnv:
    env = PoolsEnv(dataset=[{"question": "Anything?"}], rubric=PoolRubric())
    env.start_pools()
    return env
