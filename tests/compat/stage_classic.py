"""Rows, configurations and figures that the tests of the classic library's own tools share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verifiers.types import ClientConfig

from envbus.demo_model import DemoModel

ENV = "probe-classic"
TURNS = {"kind": "turns"}
ROOT = Path(__file__).parents[2]
EVAL_S = 240
RUN: dict[str, Any] = {"num_examples": 3, "rollouts_per_example": 2}


def theirs(demo: DemoModel, **settings: Any) -> ClientConfig:
    """The library's configuration of a client of the demo model."""
    return ClientConfig(api_base_url=demo.base_url, **{"api_key_var": "EMPTY", **settings})


def row(do: str = "run", **info: Any) -> Any:
    """An input that tells the probe environment what to do."""
    prompt = [{"role": "user", "content": "Add 1 and 2."}]
    return {"example_id": 0, "prompt": prompt, "answer": "3", "info": {"do": do, **info}}
