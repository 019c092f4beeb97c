"""Small in-memory runners for the evaluation's tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from envbus.types import RolloutInput, RolloutOutput


def example(example_id: Any, text: str = "", **keys: Any) -> RolloutInput:
    return {"prompt": [{"role": "user", "content": text or f"question {example_id}"}], "example_id": example_id, **keys}


def examples(count: int) -> list[RolloutInput]:
    return [example(i, answer=str(i), info={"n": i}) for i in range(count)]


def output_for(row: RolloutInput, reward: Any = 1.0, **keys: Any) -> RolloutOutput:
    return {
        "example_id": row.get("example_id", "none"),
        "prompt": row["prompt"],
        "completion": [{"role": "assistant", "content": "an answer"}],
        "reward": reward,
        "metrics": {"length": 2.0},
        "error": None,
        "token_usage": {"input_tokens": 10, "output_tokens": 5},
        **keys,
    }


class ScriptedRunner:
    """Runs a function per rollout, counts calls, and how many rollouts are in flight."""

    def __init__(self, script: Callable[[RolloutInput], Any] = output_for) -> None:
        self.script = script
        self.seen: list[RolloutInput] = []
        self.clients: list[Any] = []
        self.running = 0
        self.peak = 0
        self.cancelled = 0

    async def run_rollout(self, input: RolloutInput, client: Any, model: str, *settings: Any, **options: Any) -> Any:
        return (await self._run([input], client))[0]

    async def run_group(
        self, group_inputs: list[RolloutInput], client: Any, model: str, *settings: Any, **options: Any
    ) -> Any:
        return await self._run(group_inputs, client)

    async def _run(self, rows: Sequence[RolloutInput], client: Any) -> list[Any]:
        self.seen.extend(rows)
        self.clients.append(client)
        self.running += len(rows)
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(0)
            return [await self._one(row) for row in rows]
        except asyncio.CancelledError:
            self.cancelled += len(rows)
            raise
        finally:
            self.running -= len(rows)

    async def _one(self, row: RolloutInput) -> Any:
        result = self.script(row)
        return await result if inspect.isawaitable(result) else result
