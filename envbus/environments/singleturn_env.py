"""SingleTurnEnv: one question, one answer."""

from __future__ import annotations

from typing import Any

from envbus.environments.multiturn_env import MultiTurnEnv
from envbus.environments.state import State
from envbus.types import Messages


class SingleTurnEnv(MultiTurnEnv):
    """One model call per rollout.

    Args:
        **settings: See Environment.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(max_turns=1, **settings)

    async def env_response(self, messages: Messages, state: State) -> Messages:
        """Never asked: the rollout ends after the model's answer."""
        raise NotImplementedError
