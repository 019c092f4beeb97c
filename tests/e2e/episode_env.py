"""The stage environment with two more ways: an input that ends the process, and tasks as a host of tasksets runs them.

A task reports its traces as deltas and returns ``{"episode": {"head", "traces"}}``; its data says what shall happen.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from stage_env import StageEnv

from envbus.environments import progress


class EpisodeEnv(StageEnv):
    async def run_rollout(self, input: Any, *arguments: Any, **settings: Any) -> Any:
        if "task_data" in input:
            return await self._episode(input["task_data"] | {"example_id": input["task_data"]["idx"]})
        if input.get("do") == "exit_process":
            self._note("start", input)
            if self._starts(input) == 1:
                os._exit(7)
            return {"example_id": input["example_id"], "reward": 1.0}
        return await super().run_rollout(input, *arguments, **settings)

    async def _episode(self, task: dict[str, Any]) -> dict[str, Any]:
        self._note("start", task)
        attempt = self._starts(task)
        trace = f"{task['idx']}-{attempt}"
        try:
            for turn in range(task.get("turns", 3)):
                delta = {"trace": trace, "nodes": [{"turn": turn}], "set": {"ok": True}}
                await progress.report(delta if turn else {**delta, "open": {"id": trace, "task": task["idx"]}})
                if attempt == 1 and turn == task.get("exit_after"):
                    self._note("exit", task)
                    await asyncio.sleep(task.get("exit_delay_s", 0))
                    os._exit(7)
                await asyncio.sleep(task.get("t", 0))
        except asyncio.CancelledError:
            self._note("cancelled", task)
            raise
        if "raise" in task:
            raise RuntimeError(task["raise"])
        summary = {"id": trace, "nodes": task.get("turns", 3), "calls": 0}
        episode = {"head": {"id": "e", "env": "stage", "errors": []}, "traces": [summary]}
        return {"example_id": task["idx"], "reward": 1.0, "episode": episode}


def load_environment(ledger: str = os.devnull) -> EpisodeEnv:
    return EpisodeEnv(ledger, groups=False, teardown_s=0, tag="")
