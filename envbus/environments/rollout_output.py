"""The one place where a rollout's state becomes its output: plain data, equal in this process and over the bus."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

from envbus.bus.codec import to_plain
from envbus.environments.state import State
from envbus.error_chain import error_info
from envbus.errors import CodecError, RolloutError
from envbus.types import ErrorInfo, RolloutOutput

logger = logging.getLogger(__name__)


def rollout_output(state: State, state_columns: Iterable[str] | None = None) -> RolloutOutput:
    """The output of a finished rollout; ``reward`` is None when it failed.

    Args:
        state: The rollout's state.
        state_columns: Further keys of the state to put into the output; None where the state lacks one.
    """
    output = _fields(state)
    output.update({name: state.get(name) for name in state_columns or () if name not in output})
    try:
        return cast(RolloutOutput, to_plain(output))
    except CodecError as error:
        logger.warning("a rollout's output cannot be encoded: %s", error)
        return _without_data(output, error_info(error))


def _fields(state: State) -> dict[str, Any]:
    error = _error(state.get("error"))
    timing = state["timing"]
    timing["total_s"] = timing["setup_s"] + timing["generation_s"] + timing["scoring_s"]
    fields: dict[str, Any] = {
        "example_id": state["input"].get("example_id"),
        "prompt": state["prompt"],
        "completion": state["completion"],
        "answer": state.get("answer"),
        "info": state["info"],
        "reward": None if error else state["reward"],
        "advantage": None if error else state["advantage"],
        "metrics": state["metrics"],
        "timing": timing,
        "is_completed": state["is_completed"],
        "is_truncated": state["is_truncated"],
        "stop_condition": state["stop_condition"],
        "error": error,
        "trajectory": state["trajectory"],
        "token_usage": state["token_usage"],
        "tool_defs": state["tool_defs"],
    }
    if "env_id" in state["input"]:
        fields["env_id"] = state["input"]["env_id"]
    return fields


def _error(error: Any) -> ErrorInfo | None:
    if error is None:
        return None
    return error_info(error if isinstance(error, BaseException) else RolloutError(str(error)[:2_048]))


def _without_data(output: dict[str, Any], error: ErrorInfo) -> RolloutOutput:
    kept: dict[str, Any] = {name: output[name] for name in ("example_id", "timing", "env_id") if name in output}
    lost: dict[str, Any] = {
        "prompt": [],
        "completion": [],
        "info": {},
        "trajectory": [],
        "tool_defs": [],
        "metrics": {},
    }
    ended = {"reward": None, "advantage": None, "is_completed": False, "is_truncated": False, "stop_condition": None}
    return cast(RolloutOutput, {**kept, **lost, **ended, "answer": "", "token_usage": None, "error": error})
