"""Hosted by hand, without a model: its rows and arguments say how it fails, and it notes what it starts."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

log = logging.getLogger("envbus.case")


class CaseEnv:
    requires_group_rollouts = False

    def __init__(self, *, delay_s: float, trouble_while: str, notes: str) -> None:
        self._delay_s = delay_s
        self._trouble_while = trouble_while
        self._notes = notes

    async def run_rollout(self, input: Any, client: Any, model: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._note(f"start {input['example_id']}")
        log.debug("debug line of %s", input["example_id"])
        log.info("info line of %s", input["example_id"])
        await asyncio.sleep(input.get("delay_s", self._delay_s))
        output = {"example_id": input["example_id"], "prompt": [], "completion": [], "reward": 1.0, "pid": os.getpid()}
        return output | self._trouble(input)

    async def run_group(self, group_inputs: list[Any], client: Any, model: str, *args: Any, **kwargs: Any) -> list[Any]:
        return await asyncio.gather(*(self.run_rollout(item, client, model) for item in group_inputs))

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": number} for number in range(20)]

    async def close(self) -> None:
        self._note("teardown")

    def _trouble(self, row: Any) -> dict[str, Any]:
        if not Path(self._trouble_while).exists():
            return {}
        if row["example_id"] == 7:
            raise RuntimeError("number seven")
        if row["example_id"] == 9:
            print("dying words on stderr", file=sys.stderr, flush=True)
            os._exit(9)
        return {"note": too_deep()} if row["example_id"] == 11 else {}

    def _note(self, text: str) -> None:
        with open(self._notes, "a") as notes:
            notes.write(f"{os.getpid()} {text}\n")


def too_deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


def load_environment(
    delay_s: float = 0.0, trouble_while: str = "/nowhere/at/all", notes: str = os.devnull, dataset: str = ""
) -> CaseEnv:
    if dataset:
        Path(dataset).read_bytes()
    return CaseEnv(delay_s=delay_s, trouble_while=trouble_while, notes=notes)
