"""The environment that the tests of deploy/ serve: a ledger of its rollouts, which wait while a file is there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any


class DeployEnv:
    requires_group_rollouts = False

    def __init__(self, ledger: str, hold_while: str, size: int) -> None:
        self._ledger = ledger
        self._hold_while = hold_while
        self._size = size

    async def run_rollout(self, input: Any, client: Any, model: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._note(f"start {input['example_id']}")
        while self._hold_while and Path(self._hold_while).exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
        self._note(f"end {input['example_id']}")
        return {**input, "completion": [], "reward": 1.0}

    async def run_group(self, group_inputs: list[Any], client: Any, model: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [await self.run_rollout(item, client, model) for item in group_inputs]

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": number} for number in range(self._size)]

    async def close(self) -> None: ...

    def _note(self, text: str) -> None:
        with open(self._ledger, "a") as ledger:
            ledger.write(f"{os.getpid()} {text}\n")


def load_environment(ledger: str = os.devnull, hold_while: str = "", size: int = 8) -> DeployEnv:
    return DeployEnv(ledger, hold_while, size)
