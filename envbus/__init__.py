"""envbus: reinforcement-learning environments served on NATS.

Names are loaded when they are first used, so that importing envbus costs
little and a client never imports what only environments need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envbus.client import NATSEnvClient
    from envbus.demo_model import DemoModel
    from envbus.environments import (
        EnvGroup,
        Environment,
        MultiTurnEnv,
        Parser,
        Rubric,
        SingleTurnEnv,
        ToolEnv,
        cleanup,
        load_environment,
        stop,
        teardown,
    )
    from envbus.logs import setup_logging
    from envbus.server import NATSEnvServer
    from envbus.settings import ClientSettings, ServerSettings
    from envbus.types import ClientConfig, EndpointConfig, ErrorInfo, RolloutInput, RolloutOutput, RolloutProgress

__version__ = "0.1.0"

_HOMES = {
    "envbus.client": ("NATSEnvClient",),
    "envbus.demo_model": ("DemoModel",),
    "envbus.environments": (
        "EnvGroup",
        "Environment",
        "MultiTurnEnv",
        "Parser",
        "Rubric",
        "SingleTurnEnv",
        "ToolEnv",
        "cleanup",
        "load_environment",
        "stop",
        "teardown",
    ),
    "envbus.logs": ("setup_logging",),
    "envbus.server": ("NATSEnvServer",),
    "envbus.settings": ("ClientSettings", "ServerSettings"),
    "envbus.types": ("ClientConfig", "EndpointConfig", "ErrorInfo", "RolloutInput", "RolloutOutput", "RolloutProgress"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ClientConfig",
    "ClientSettings",
    "DemoModel",
    "EndpointConfig",
    "EnvGroup",
    "Environment",
    "ErrorInfo",
    "MultiTurnEnv",
    "NATSEnvClient",
    "NATSEnvServer",
    "Parser",
    "RolloutInput",
    "RolloutOutput",
    "RolloutProgress",
    "Rubric",
    "ServerSettings",
    "SingleTurnEnv",
    "ToolEnv",
    "cleanup",
    "load_environment",
    "setup_logging",
    "stop",
    "teardown",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'envbus' has no attribute {name!r}")
    return getattr(import_module(home), name)
