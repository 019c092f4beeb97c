"""Outputs of the bus in the shape that verifiers 0.1.x reads and saves.

Those of its own environments have it already; outputs of other environments, and of calls whose environment raised, get
what is missing. Plain data: verifiers need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PHASES = ("setup", "generation", "scoring")


def classic_output(output: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """Complete one output; what it holds in the library's shape stays as it is.

    Args:
        output: As the bus returned it.
        example: The rollout's input.
    """
    whole = {**_empty(example), **output}
    timing = whole["timing"]
    if "generation" in timing:
        return whole
    whole["timing"] = _timing(timing)
    whole["reward"] = 0.0 if whole["reward"] is None else whole["reward"]
    whole["metrics"] = dict(whole["metrics"] or {})
    for name in ("prompt", "completion"):
        whole[name] = [_message(each) for each in whole[name]] if isinstance(whole[name], list) else whole[name]
    whole["tool_defs"] = [_tool(each) for each in whole["tool_defs"] or ()]
    _add_error_texts(whole)
    for name in ("answer", "info", "token_usage"):
        if not whole.get(name):
            whole.pop(name, None)
    return {**whole["metrics"], **whole}


def _empty(example: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "example_id": example.get("example_id", 0),
        "prompt": example.get("prompt"),
        "completion": None,
        "reward": 0.0,
        "error": None,
        "timing": {},
        "is_completed": False,
        "is_truncated": False,
        "stop_condition": None,
        "metrics": {},
        "tool_defs": [],
    }


def _timing(ours: Mapping[str, Any]) -> dict[str, Any]:
    """Spans instead of lengths, one phase after the other from the start."""
    start_time = at = float(ours.get("start_time", 0.0))
    spans = {}
    for phase in _PHASES:
        length_s = float(ours.get(f"{phase}_s", 0.0))
        spans[phase] = {"start": at, "end": at + length_s, "duration": length_s}
        at += length_s
    model_s = float(ours.get("model_s", 0.0))
    total_s = float(ours.get("total_s", 0.0))
    known_s = spans["setup"]["duration"] + spans["scoring"]["duration"] + model_s
    return {
        "start_time": start_time,
        **spans,
        "model": {"spans": [], "duration": model_s},
        "env": {"spans": [], "duration": 0.0},
        "total": total_s,
        "overhead": max(0.0, total_s - known_s),
    }


def _message(message: Any) -> Any:
    """A message with its tool calls as the library saves them: JSON texts of id, name and arguments."""
    if not isinstance(message, dict) or not message.get("tool_calls"):
        return message
    calls = [json.dumps(_flat_call(call)) if isinstance(call, dict) else call for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _flat_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return {"id": call.get("id"), **function} if isinstance(function, dict) else call


def _tool(tool: Any) -> Any:
    return tool["function"] if isinstance(tool, dict) and isinstance(tool.get("function"), dict) else tool


def _add_error_texts(output: dict[str, Any]) -> None:
    error = output["error"]
    if isinstance(error, Mapping):
        output["error_chain"] = error.get("error_chain_repr", "")
        output["long_error_chain"] = error.get("error_chain_str", "")
