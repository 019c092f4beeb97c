"""The state of one rollout: a plain dict that hooks, env_response and reward functions read and write."""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from envbus.errors import UsageError
from envbus.types import Messages, SamplingArgs

State = dict[str, Any]
"""Keys: the example's columns (prompt, answer, info, example_id, ...); ``input``, the example as it came; ``client``,
``model``, ``sampling_args``, ``tool_defs``; ``trajectory``, ``turn``, ``completion``, ``final_env_response``;
``is_completed``, ``is_truncated``, ``stop_condition``, ``error``; ``reward``, ``advantage``, ``metrics``; ``timing``,
``token_usage``. A column with the name of one of the later keys is only in ``input``."""


def new_state(
    row: Mapping[str, Any],
    *,
    client: Any = None,
    model: str = "",
    sampling_args: SamplingArgs | None = None,
    tool_defs: list[dict[str, Any]] | None = None,
) -> State:
    """The state that a rollout starts with. The example is copied, so that rollouts never share mutable parts."""
    example = copy.deepcopy(dict(row))
    return {
        "answer": "",
        **example,
        "input": example,
        "prompt": as_messages(example.get("prompt") or []),
        "info": _info(example.get("info")),
        "client": client,
        "model": model,
        "sampling_args": dict(sampling_args or {}),
        "tool_defs": tool_defs or [],
        "trajectory": [],
        "trajectory_id": uuid.uuid4().hex,
        "turn": 0,
        "completion": [],
        "final_env_response": None,
        "is_completed": False,
        "is_truncated": False,
        "stop_condition": None,
        "error": None,
        "reward": None,
        "advantage": None,
        "metrics": {},
        "token_usage": None,
        "timing": {
            "start_time": time.time(),
            "setup_s": 0.0,
            "generation_s": 0.0,
            "scoring_s": 0.0,
            "model_s": 0.0,
            "total_s": 0.0,
        },
    }


def as_messages(value: Any) -> Messages:
    """Messages from a list of them, a single one, or the text of a user message."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, Mapping):
        return [dict(value)]
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return [dict(message) for message in value]
    raise UsageError(f"messages must be a list of dicts with role and content, or a text; got {type(value).__name__}")


def _info(value: Any) -> dict[str, Any]:
    info = json.loads(value) if isinstance(value, str) and value else value
    if info is None or info == "":
        return {}
    if not isinstance(info, Mapping):
        raise UsageError(f"info must be a dict or a JSON object; got {type(value).__name__}")
    return dict(info)
