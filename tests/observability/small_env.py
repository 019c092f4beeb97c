"""The smallest environment that can be served: its inputs say what to do."""

from __future__ import annotations

import asyncio
import threading
from typing import Any


class SmallEnv:
    requires_group_rollouts = False

    def __init__(self) -> None:
        self.may_load = threading.Event()
        self.may_load.set()
        self.may_end = asyncio.Event()

    async def run_rollout(self, item: Any, *arguments: Any, **options: Any) -> Any:
        match item["do"]:
            case "wait":
                await self.may_end.wait()
            case "raise":
                raise ValueError("asked for")
        output = {"example_id": item["example_id"], "reward": item.get("reward", 1.0), "error": None}
        return output | {"timing": {"total_s": item.get("took_s", 0.2)}}

    async def run_group(self, items: Any, *arguments: Any, **options: Any) -> Any:
        return [await self.run_rollout(item) for item in items]

    def eval_examples(self) -> list[Any]:
        self.may_load.wait(20)
        return [{"example_id": number, "prompt": []} for number in range(3)]

    async def close(self) -> None:
        pass


def do(what: str, example_id: Any = "e", **fields: Any) -> Any:
    return {"prompt": [], "example_id": example_id, "do": what, **fields}
