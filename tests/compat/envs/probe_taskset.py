"""A taskset of verifiers 0.4 that does what its rows and the tests ask for; it notes it in the file named by LEDGER."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import httpx
import verifiers.v1 as vf

__all__ = ["ProbeEnv", "ProbeHarness", "ProbeTaskset"]


def note(event: str, about: object = "") -> None:
    if path := os.environ.get("LEDGER"):
        with open(path, "a") as ledger:
            ledger.write(f"{event} {about}\n")


async def gate() -> None:
    """Wait until the test makes the file."""
    while not Path(os.environ["LEDGER"] + ".gate").exists():  # noqa: ASYNC110, ASYNC240 - made by another process
        await asyncio.sleep(0.01)


class ProbeData(vf.TaskData):
    answer: str = ""
    do: str = "run"
    turns: int = 2


class ProbeTask(vf.Task[ProbeData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.do == "raise in setup":
            try:
                raise KeyError("cause")
            except KeyError as error:
                raise RuntimeError("broken") from error

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.record_metric("turns", trace.num_turns)

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.do == "raise in reward":
            raise ValueError("no\nreward")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ProbeConfig(vf.TasksetConfig):
    size: int | None = 3
    """None: endless."""


class ProbeTaskset(vf.Taskset[ProbeTask, ProbeConfig]):
    @property
    def bounded(self) -> bool:
        return self._bounded or self.config.size is not None

    def load(self) -> Iterator[ProbeTask]:
        for number in islice(count(), self.config.size):
            note("loaded", number)
            data = ProbeData(
                name=f"sum-{number}",
                prompt=f"Add {number} and {number + 1}.",
                system_prompt="Give a number.",
                answer=str(2 * number + 1),
            )
            yield ProbeTask(data, self.config.task)


class ProbeHarnessConfig(vf.HarnessConfig):
    pass


class ProbeHarness(vf.Harness[ProbeHarnessConfig]):
    """A chat loop in this process: every turn repeats the question."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: ProbeData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=60, headers=headers) as client:
            for turn in range(data.turns):
                if data.do == "wait" and turn == 1:
                    await gate()
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint.rstrip('/')}/chat/completions", json=body)
                answer.raise_for_status()
                note("turn", data.idx)
                messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And once more."}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def cleanup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        note("cleanup", trace.task.data.idx)


class ProbeEnvConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    start: str = "at once"


class ProbeEnv(vf.Env[ProbeEnvConfig]):
    async def start(self) -> None:
        note("start")
        if self.config.start == "raise":
            raise OSError("no such tool server")
        if self.config.start == "wait":
            await gate()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
        if task.data.do == "raise in the env":
            raise LookupError("lost")

    async def stop(self) -> None:
        note("stop")
