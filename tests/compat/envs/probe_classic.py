"""Environments of the classic library that do what the tests ask for; they note it in the file named by LEDGER."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import verifiers as vf
from datasets import Dataset

GROUP_OF_SIBLINGS = 3


def note(event: str, about: object = "") -> None:
    if path := os.environ.get("LEDGER"):
        with open(path, "a") as ledger:
            ledger.write(f"{event} {about}\n")


def load_environment(kind: str = "turns") -> vf.Environment:
    return KINDS[kind]()


# ---- one that does what its row says


class Turns(vf.MultiTurnEnv):
    """The row's ``info`` says what happens: ``do``, ``turns``, ``pause_s``."""

    label = "unset"

    def __init__(self, name: str = "turns", **settings: Any) -> None:
        row = {"prompt": [{"role": "user", "content": "Add 1 and 2."}], "answer": "3", "info": {"do": "run"}}
        super().__init__(dataset=Dataset.from_list([row] * 3), max_turns=1000, **settings)
        self.name = name
        self.siblings: set[int] = set()
        self.siblings_run = asyncio.Event()

    async def setup_state(self, state: Any, **objects: Any) -> Any:
        do = state["info"]["do"]
        if do == "raise":
            await self.siblings_run.wait()
            try:
                raise KeyError("cause")
            except KeyError as error:
                raise RuntimeError("broken") from error
        if do == "library error":
            raise vf.InfraError("no machine") from OSError("refused")
        return state

    async def env_response(self, messages: Any, state: Any, **objects: Any) -> Any:
        self.siblings.add(state["example_id"])
        if len(self.siblings) == GROUP_OF_SIBLINGS - 1:
            self.siblings_run.set()
        note("turn", state["example_id"])
        await asyncio.sleep(state["info"].get("pause_s") or 0)
        return [{"role": "user", "content": "And 1 more."}]

    @vf.stop
    async def enough(self, state: Any, **objects: Any) -> bool:
        return len(state["trajectory"]) >= (state["info"].get("turns") or 1)

    @vf.cleanup
    async def clean(self, state: Any) -> None:
        await asyncio.sleep(0.05)
        note("cleanup", state["example_id"])

    @vf.teardown
    async def tear_down(self) -> None:
        note("teardown", self.name)


def length(completion: Any) -> float:
    return float(len(str(completion)))


def misbehaves(completion: Any) -> float:
    return 1 / 0


def turns() -> vf.Environment:
    def label(state: Any) -> float:
        return float(len(env.label))

    def blocks(info: Any) -> float:
        if info["do"] == "block":
            note("blocking")
            time.sleep(3)
            note("unblocked")
        return 0.0

    env = Turns(rubric=vf.Rubric(funcs=[length, misbehaves, label, blocks], weights=[1.0, 1.0, 0.0, 0.0]))
    return env


# ---- tools, mixtures, a load that takes long


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def right(completion: Any, answer: str) -> float:
    return float(answer in str(completion))


def shortest(completions: Any) -> list[float]:
    lengths = [len(str(completion)) for completion in completions]
    return [float(each == min(lengths)) for each in lengths]


def sums(count: int, start: int) -> Dataset:
    numbers = range(start, start + count)
    return Dataset.from_list([{"question": f"Add {n} and {n + 1}.", "answer": str(2 * n + 1)} for n in numbers])


def tools() -> vf.Environment:
    return vf.ToolEnv(tools=[add], max_turns=4, dataset=lambda: sums(5, 1), rubric=vf.Rubric(funcs=[right]))


def mixture() -> vf.Environment:
    """No environment of the outer group has a group reward, one of the inner group has."""
    alone = vf.SingleTurnEnv(eval_dataset=sums(2, 20), rubric=vf.Rubric(funcs=[right]))
    together = vf.SingleTurnEnv(eval_dataset=sums(2, 40), rubric=vf.Rubric(funcs=[right, shortest]))
    outer = [vf.EnvGroup([alone], env_names=["alone"])]
    outer += [
        vf.EnvGroup([together, Turns("inner", rubric=vf.Rubric(funcs=[length]))], env_names=["together", "turns"])
    ]
    return vf.EnvGroup(outer, env_names=["plain", "mixed"])


def slow_load() -> vf.Environment:
    env = turns()
    note("constructed")
    time.sleep(120)
    return env


KINDS = {"turns": turns, "tools": tools, "mixture": mixture, "slow_load": slow_load}
