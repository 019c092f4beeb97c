"""Environments: what is rolled out and how it is scored. Start with SingleTurnEnv, Rubric and load_environment."""

from envbus.environments.env_group import EnvGroup
from envbus.environments.environment import Environment
from envbus.environments.hooks import cleanup, stop, teardown
from envbus.environments.loader import add_env_dir, check_hostable, load_environment
from envbus.environments.model_client import ModelClients, close_clients, resolve_client
from envbus.environments.multiturn_env import MultiTurnEnv
from envbus.environments.parsers import Parser, ThinkParser, XMLParser
from envbus.environments.rubric import Rubric, RubricGroup
from envbus.environments.singleturn_env import SingleTurnEnv
from envbus.environments.state import State
from envbus.environments.tool_env import ToolEnv

__all__ = [
    "EnvGroup",
    "Environment",
    "ModelClients",
    "MultiTurnEnv",
    "Parser",
    "Rubric",
    "RubricGroup",
    "SingleTurnEnv",
    "State",
    "ThinkParser",
    "ToolEnv",
    "XMLParser",
    "add_env_dir",
    "check_hostable",
    "cleanup",
    "close_clients",
    "load_environment",
    "resolve_client",
    "stop",
    "teardown",
]
