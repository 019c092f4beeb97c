"""The kinds of calls that the clients of a chaos run make, and what each must end with."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from chaos_env import blob

from envbus import NATSEnvClient
from envbus.evaluation import generate
from envbus.evaluation.results import read_rows

MB = 1_000_000
HANG_S = 90.0
"""Longer than any recovery: such a rollout only ends by being cancelled."""
WEIGHTS = {
    "short": 30,
    "long": 12,
    "group": 8,
    "result-1mb": 6,
    "result-5mb": 2,
    "input-1mb": 5,
    "cancel": 8,
    "timeout": 6,
    "fail": 5,
    "block": 2,
    "gil": 2,
    "eval": 2,
}
GIVE_UP_S = 0.8
"""Time limit of the client that makes the ``timeout`` calls."""
GROUP_SIZE = 3
EVAL_SIZE = 6


class Caller:
    """Makes one call after the other and judges its result.

    Args:
        client: For all kinds but ``timeout``.
        hasty: A client with a time limit, for ``timeout``.
        folder: Where evaluations save their results.
    """

    def __init__(self, client: NATSEnvClient, hasty: NATSEnvClient, rng: random.Random, folder: Path) -> None:
        self._client = client
        self._hasty = hasty
        self._rng = rng
        self._folder = folder

    def draw(self) -> str:
        """Return the kind of the next call."""
        return self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]

    async def call(self, kind: str, key: str) -> bool:
        """Make a call; whether its result is the right one."""
        return await self._ways()[kind](key)

    def _ways(self) -> dict[str, Callable[[str], Awaitable[bool]]]:
        rng = self._rng
        return {
            "short": lambda key: self._rollout(_item(key, for_s=rng.uniform(0, 0.2))),
            "long": lambda key: self._rollout(_item(key, for_s=rng.uniform(0.5, 5))),
            "group": self._group,
            "result-1mb": lambda key: self._rollout(_item(key, bytes=MB)),
            "result-5mb": lambda key: self._rollout(_item(key, bytes=5 * MB)),
            "input-1mb": lambda key: self._rollout(_item(key, content=_long_text(key))),
            "cancel": self._cancel,
            "timeout": lambda key: self._rollout(_item(key, for_s=HANG_S), self._hasty),
            "fail": self._fail,
            "block": lambda key: self._rollout(_item(key, do="block", for_s=rng.uniform(0.05, 0.5))),
            "gil": lambda key: self._rollout(_item(key, do="gil", for_s=rng.uniform(0.05, 0.5))),
            "eval": self._eval,
        }

    async def _rollout(self, item: Any, client: NATSEnvClient | None = None) -> bool:
        return is_right(item, await (client or self._client).run_rollout(item, None, "m"))

    async def _group(self, key: str) -> bool:
        items = [_item(f"{key}/{place}", for_s=self._rng.uniform(0, 1)) for place in range(GROUP_SIZE)]
        outputs = await self._client.run_group(items, None, "m")
        return len(outputs) == len(items) and all(map(is_right, items, outputs))

    async def _cancel(self, key: str) -> bool:
        calling = asyncio.create_task(self._rollout(_item(key, for_s=HANG_S)))
        await asyncio.wait([calling], timeout=self._rng.uniform(0, 1.5))
        calling.cancel()
        return await calling

    async def _fail(self, key: str) -> bool:
        output: Any = await self._client.run_rollout(_item(key, do="fail"), None, "m")
        return output["error"] is not None and output.get("reward") is None

    async def _eval(self, key: str) -> bool:
        items = [_item(f"{key}/{place}", for_s=self._rng.uniform(0, 0.5)) for place in range(EVAL_SIZE)]
        path = self._folder / f"eval-{key}"
        run = await generate(self._client, items, None, "m", env_id="chaos-env", results_path=path)
        outputs: list[Any] = run["outputs"]
        saved = run["metadata"]["save_error"] is not None or len(read_rows(path)) == len(items)
        right = [output.get("error") or is_right(item, output) for item, output in zip(items, outputs, strict=False)]
        return saved and len(right) == len(items) and all(right)


def is_right(item: Any, output: Any) -> bool:
    """Whether an output is the one of this input."""
    answer = output.get("answer") or {}
    digest = hashlib.sha256(item["prompt"][0]["content"].encode()).hexdigest()
    right_blob = blob(item["key"], item["bytes"]) if "bytes" in item else None
    return bool(
        answer.get("key") == item["key"] and answer.get("input_digest") == digest and answer.get("blob") == right_blob
    )


def _item(key: str, *, do: str = "sleep", for_s: float = 0.0, content: str = "", **more: Any) -> Any:
    prompt = [{"role": "user", "content": content}]
    return {"prompt": prompt, "example_id": key, "key": key, "do": do, "for_s": for_s} | more


def _long_text(key: str) -> str:
    half = hashlib.shake_256(key.encode()).hexdigest(MB // 4)
    return half + key * (MB // 2 // len(key))
