"""An environment of the classic library whose rollouts go to an env server that is there already."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from verifiers.serve import ZMQEnvClient


def load_environment(env: str, address: str, env_args: dict[str, Any] | None = None) -> vf.Environment:
    environment = vf.load_environment(env, **(env_args or {}))
    environment.env_client = ZMQEnvClient(address)
    return environment
