"""An environment that misbehaves on demand; served by real processes in the tests of the command line."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from envbus import Rubric, SingleTurnEnv, teardown

ROWS = [{"question": f"Reverse {word}.", "answer": word[::-1], "info": {"word": word}} for word in ("ab", "cd", "ef")]
pools: list[Executor] = []


class ProbeEnv(SingleTurnEnv):
    delay_s = 0.0
    hold_while = ""
    teardown_s = 0.0

    async def setup_state(self, state: Any) -> None:
        await asyncio.sleep(self.delay_s)
        while self.hold_while and Path(self.hold_while).exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.05)

    @teardown
    def linger(self) -> None:
        time.sleep(self.teardown_s)


def load_environment(
    mode: str = "ok", delay_s: float = 0.0, fail_while: str = "", hold_while: str = "", size: int = 3
) -> ProbeEnv:
    print("probe env prints", flush=True)
    logging.getLogger("envbus.probe").warning("probe env logs")
    _misbehave(mode, delay_s)

    def score(info: dict[str, Any]) -> float:
        if fail_while and Path(fail_while).exists() and info["word"] == "cd":
            raise RuntimeError("probe failure")
        return 1.0

    rows = [dict(ROWS[index % 3]) for index in range(size)]
    env = ProbeEnv(dataset=rows, rubric=Rubric(funcs=[score]))
    env.hold_while = hold_while
    env.delay_s = delay_s if mode != "slow_load" else 0.0
    env.teardown_s = 60.0 if mode == "slow_teardown" else 0.0
    return env


def _misbehave(mode: str, delay_s: float) -> None:
    if mode == "missing_import":
        raise ImportError("no module foo_bar")
    if mode == "os_exit":
        print("about to leave", file=sys.stderr, flush=True)
        os._exit(3)
    if mode == "sys_exit":
        sys.exit(3)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "slow_load":
        time.sleep(delay_s)
    if mode == "stuck_pool":
        pools[:] = [ThreadPoolExecutor(1), ProcessPoolExecutor(1)]
        pools[0].submit(threading.Event().wait)
        pools[1].submit(time.sleep, 600)
