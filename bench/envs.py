"""Environments of the benchmarks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any


class PayloadEnv:
    """Returns at once, or after ``sleep_s`` of the input, with about as many bytes as the input's ``size`` says."""

    requires_group_rollouts = False

    async def run_rollout(
        self,
        input: dict[str, Any],
        client: Any,
        model: str,
        sampling_args: Any = None,
        max_retries: int = 0,
        state_columns: Any = None,
    ) -> dict[str, Any]:
        if "sleep_s" in input:
            await asyncio.sleep(input["sleep_s"])
        return {"example_id": input["example_id"], "reward": 1.0, **payload(input.get("size", 1_000))}

    async def run_group(self, group_inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return [await self.run_rollout(item, *args, **kwargs) for item in group_inputs]

    def eval_examples(self) -> Sequence[dict[str, Any]]:
        return []

    async def close(self) -> None:
        pass


@functools.cache
def payload(size: int) -> dict[str, Any]:
    """Text for small results; token ids, masks and logprobs for large ones, as a trainer gets them."""
    if size <= 100_000:
        return {"completion": "x" * size}
    tokens = size // 13
    return {
        "completion_ids": [(index * 7919) % 150_000 for index in range(tokens)],
        "completion_mask": [1] * tokens,
        "completion_logprobs": [-0.001 * (index % 5_000) for index in range(tokens)],
    }
