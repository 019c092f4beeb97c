"""The environment of the chaos runs: each input says what to do; every attempt leaves its start and its end.

What it returns follows from the input alone, so that the caller can tell a right
result from a wrong one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import sys
import time
from typing import Any

import chaos_ledger as ledger
from chaos_orders import Orders, hold_gil

from envbus.errors import ToolCallError


class ChaosEnv:
    requires_group_rollouts = False

    def __init__(self) -> None:
        self._folder = ledger.run_folder()

    async def run_rollout(
        self,
        input: Any,
        client: Any,
        model: str,
        sampling_args: Any = None,
        max_retries: int = 0,
        state_columns: Any = None,
    ) -> Any:
        attempt = secrets.token_hex(8)
        self._note("start", input, attempt)
        try:
            await self._act(input)
        except asyncio.CancelledError:
            self._note("cancel", input, attempt)
            raise
        except ToolCallError:
            self._note("end", input, attempt)
            raise
        self._note("end", input, attempt)
        digest = hashlib.sha256(input["prompt"][0]["content"].encode()).hexdigest()
        answer = {"key": input["key"], "input_digest": digest}
        if input.get("bytes"):
            answer["blob"] = blob(input["key"], input["bytes"])
        return {"example_id": input["example_id"], "reward": 1.0, "answer": answer}

    async def run_group(self, group_inputs: list[Any], client: Any, model: str, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.gather(*(self.run_rollout(item, client, model) for item in group_inputs))

    async def _act(self, item: Any) -> None:
        match item["do"]:
            case "sleep":
                await asyncio.sleep(item["for_s"])
            case "block":
                time.sleep(item["for_s"])  # noqa: ASYNC251 - an env that blocks its loop
            case "gil":
                hold_gil(item["for_s"])
            case "fail":
                raise ToolCallError("as the input says")

    def eval_examples(self) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        pass

    def _note(self, event: str, item: Any, attempt: str) -> None:
        ledger.write(self._folder, ledger.ATTEMPTS, event=event, key=item["key"], attempt=attempt)


def blob(key: str, size_bytes: int) -> bytes:
    """Return bytes that belong to a key; a third of them can be compressed."""
    return (hashlib.shake_256(key.encode()).digest(size_bytes * 2 // 3) + key.encode() * (size_bytes // len(key)))[
        :size_bytes
    ]


def load_environment() -> ChaosEnv:
    folder = ledger.run_folder()
    Orders(folder, asyncio.get_running_loop(), dict).start()
    ledger.write(folder, ledger.PROCESSES, event="born", role="server", parent=os.getppid(), command=sys.argv[1:3])
    return ChaosEnv()
