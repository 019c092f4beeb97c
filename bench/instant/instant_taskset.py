"""A taskset of verifiers 0.4 whose episodes end at once, without a trace."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["InstantEnv", "InstantTaskset"]


class InstantTask(vf.Task[vf.TaskData]):
    pass


class InstantTaskset(vf.Taskset[InstantTask, vf.TasksetConfig]):
    def load(self) -> list[InstantTask]:
        return [InstantTask(vf.TaskData(prompt="Add 1 and 2."), self.config.task)]


class InstantEnvConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class InstantEnv(vf.Env[InstantEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        pass
