"""Outputs of rollouts that never gave one, and checks of those that did (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from envbus.error_chain import error_info
from envbus.errors import RolloutError
from envbus.types import RolloutInput, RolloutOutput


def repeat_examples(examples: Sequence[RolloutInput], rollouts_per_example: int) -> list[RolloutInput]:
    """Repeat each example that many times in a row: the inputs of ``generate``."""
    return [example for example in examples for _ in range(rollouts_per_example)]


def failed_output(
    example: RolloutInput, error: BaseException, *, example_id: int | str, start_time: float, total_s: float
) -> RolloutOutput:
    """The output of a rollout whose call raised: no reward, but its example and the error."""
    output: RolloutOutput = {
        "example_id": example.get("example_id", example_id),
        "prompt": example.get("prompt", []),
        "completion": [],
        "answer": example.get("answer", ""),
        "info": example.get("info", {}),
        "reward": None,
        "metrics": {},
        "timing": {
            "start_time": start_time,
            "setup_s": 0.0,
            "generation_s": 0.0,
            "scoring_s": 0.0,
            "model_s": 0.0,
            "total_s": total_s,
        },
        "is_completed": False,
        "is_truncated": False,
        "stop_condition": None,
        "error": error_info(error),
        "trajectory": [],
        "token_usage": None,
    }
    if "env_id" in example:
        output["env_id"] = example["env_id"]
    return output


def malformed_field(output: Mapping[str, Any]) -> str | None:
    """The name of a field that displays and summaries could not read, or None."""
    for name in ("error", "metrics", "timing", "token_usage"):
        value = output.get(name)
        is_nothing = value is None or (isinstance(value, str | bool) and not value)
        if not (is_nothing or isinstance(value, Mapping)):
            return name
    error = output.get("error")
    return "error" if error and not isinstance(error.get("error"), str) else None


def checked_outputs(outputs: Any, expected: int) -> list[RolloutOutput]:
    """The outputs of a call, once they are known to be as many dicts as there were inputs.

    Raises:
        RolloutError: They are not.
    """
    if not isinstance(outputs, Sequence) or isinstance(outputs, str | bytes):
        raise RolloutError(f"the environment returned {type(outputs).__name__} where outputs were expected")
    if len(outputs) != expected:
        raise RolloutError(f"the environment returned {len(outputs)} outputs for {expected} inputs")
    for output in outputs:
        if not isinstance(output, dict):
            raise RolloutError(f"the environment returned an output of type {type(output).__name__}, not a dict")
        if (name := malformed_field(output)) is not None:
            kind = type(output[name]).__name__
            raise RolloutError(f"the environment returned an output whose {name!r} is malformed: of type {kind}")
    return cast(list[RolloutOutput], list(outputs))
