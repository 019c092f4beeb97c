"""An environment of verifiers 0.1 whose rollouts end at once."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

TIMING = {name: {"start": 0.0, "end": 0.0, "duration": 0.0} for name in ("setup", "generation", "scoring")}
TIMING |= {"model": {"spans": [], "duration": 0.0}, "env": {"spans": [], "duration": 0.0}}


class Instant(vf.SingleTurnEnv):
    async def run_rollout(self, input: Any, *arguments: Any, **settings: Any) -> Any:
        return {
            "example_id": input["example_id"],
            "prompt": input["prompt"],
            "completion": [{"role": "assistant", "content": "x" * 1000}],
            "reward": 1.0,
            "timing": {"start_time": 0.0, **TIMING, "total": 0.0, "overhead": 0.0},
            "is_completed": True,
            "is_truncated": False,
            "metrics": {},
            "error": None,
            "stop_condition": None,
            "tool_defs": [],
        }


def load_environment() -> vf.Environment:
    return Instant(dataset=Dataset.from_list([{"question": "Add 1 and 2.", "answer": "3"}]))
