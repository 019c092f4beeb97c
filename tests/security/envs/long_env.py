"""An environment whose rollouts take their time, and whose results come in many parts."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any


class LongEnv:
    requires_group_rollouts = False

    def __init__(self, rollout_s: float, result_bytes: int) -> None:
        self._rollout_s = rollout_s
        self._result_bytes = result_bytes

    async def run_rollout(self, item: Any, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(self._rollout_s)
        return {
            "example_id": item["example_id"],
            "prompt": [],
            "completion": secrets.token_hex(self._result_bytes // 2),
            "reward": 1.0,
        }

    async def run_group(self, items: Any, *arguments: Any, **options: Any) -> Any:
        return list(await asyncio.gather(*(self.run_rollout(item) for item in items)))

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": number} for number in range(4)]

    async def close(self) -> None:
        pass


def load_environment(rollout_s: float = 0.0, result_bytes: int = 0) -> LongEnv:
    return LongEnv(rollout_s, result_bytes)
