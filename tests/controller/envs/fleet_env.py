"""The environment that the controller's tests launch: its arguments and inputs say how it behaves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any


class FleetEnv:
    requires_group_rollouts = False

    def __init__(self, notes: str, teardown_s: float) -> None:
        self._notes = notes
        self._teardown_s = teardown_s

    async def run_rollout(self, input: Any, client: Any, model: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._note(f"start {input['example_id']}")
        if busy_s := input.get("busy_s", 0):
            until = time.monotonic() + busy_s
            while time.monotonic() < until:
                sum(range(1000))
        await asyncio.sleep(input.get("sleep_s", 0))
        return {"example_id": input["example_id"], "reward": 1.0, "pid": os.getpid()}

    async def run_group(self, group_inputs: list[Any], client: Any, model: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [await self.run_rollout(item, client, model) for item in group_inputs]

    def eval_examples(self) -> list[Any]:
        return [{"prompt": [], "example_id": number} for number in range(4)]

    async def close(self) -> None:
        self._note("teardown begins")
        await asyncio.sleep(self._teardown_s)
        self._note("teardown ends")

    def _note(self, text: str) -> None:
        with open(self._notes, "a") as notes:
            notes.write(f"{os.getpid()} {text}\n")


def load_environment(
    notes: str = os.devnull, load: str = "", load_s: float = 0, teardown_s: float = 0, helpers: bool = False
) -> FleetEnv:
    print("loading, says the environment", file=sys.stderr)
    time.sleep(load_s)
    if load == "import error":
        import foo_bar  # noqa: F401
    if load == "exit":
        sys.exit(3)
    if helpers:  # a child of a child, in a session of its own: as browsers and interpreters do it
        command = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
        subprocess.run([sys.executable, "-c", command], check=True)
        subprocess.Popen(["sleep", "601"])
    return FleetEnv(notes, teardown_s)
