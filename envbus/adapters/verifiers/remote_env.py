"""An Environment of verifiers 0.1.x that has nothing of its own: examples and rollouts come from the bus.

Works in the process of a tool and in the library's server processes: there the model client that it is given is turned
back into its config. Imports verifiers: import it only where that is used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import ClientConfig

from envbus.adapters.verifiers.remote_client import BusEnvClient
from envbus.client import NATSEnvClient
from envbus.errors import UsageError

T = TypeVar("T")


class RemoteEnvironment(vf.Environment):
    """An env of the bus, for the tools of the library.

    Only the eval set crosses the bus: ``get_dataset`` has nothing.

    Args:
        connect: Makes a client of the env.
        fleet: Where rollouts go; closed at teardown.
    """

    def __init__(self, connect: Callable[[], NATSEnvClient], fleet: BusEnvClient) -> None:
        info = ask(connect, lambda client: client.wait_for_server())
        self._fleet = fleet
        super().__init__(
            eval_dataset=lambda: dataset_of(ask(connect, lambda client: client.examples())),
            # Trainers look at the reward functions, too, for whether rollouts are scored in groups.
            rubric=vf.Rubric(funcs=[scored_there] if info.requires_group_rollouts else []),
        )
        self.env_client = fleet

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Only None, the default."""
        if max_seq_len is not None:
            raise UsageError(_set_there("max_seq_len", max_seq_len))
        super().set_max_seq_len(max_seq_len)

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        """Only True, the default."""
        if not score_rollouts:
            raise UsageError(_set_there("score_rollouts", score_rollouts))
        super().set_score_rollouts(score_rollouts)

    async def run_rollout(
        self,
        input: Any,
        client: Any,
        model: str,
        sampling_args: Any,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
        env_client: Any = None,
    ) -> Any:
        """Run one rollout on the fleet, or on the library's server if one was started."""
        runner = env_client or self.env_client or self._fleet
        config = config_of(client)
        return await runner.run_rollout(row_of(input), config, model, sampling_args, max_retries, state_columns)

    async def run_group(
        self,
        group_inputs: Any,
        client: Any,
        model: str,
        sampling_args: Any,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
        env_client: Any = None,
        **_: Any,
    ) -> Any:
        """Run rollouts of one example, as run_rollout does."""
        runner = env_client or self.env_client or self._fleet
        rows, config = [row_of(each) for each in group_inputs], config_of(client)
        return await runner.run_group(rows, config, model, sampling_args, max_retries, state_columns)

    async def rollout(self, *arguments: Any, **settings: Any) -> Any:
        """Not here: a rollout is generated and scored on a server."""
        raise UsageError("an env on the bus generates and scores in one: call run_rollout or run_group")

    @vf.teardown
    async def leave_the_bus(self) -> None:
        """Cancel what still runs, and disconnect."""
        with suppress(RuntimeError):  # at the interpreter's exit no thread can be waited for, nor need it
            await self._fleet.close()

    def _format_dataset_source(self, dataset: Any) -> Any:
        """Rows from the bus are inputs already; ids and routes must stay what the servers know."""
        return dataset


async def scored_there(completions: list[Any]) -> list[float]:
    """In place of the group reward functions of the servers."""
    raise UsageError("an env on the bus scores on its servers")


def ask(connect: Callable[[], NATSEnvClient], question: Callable[[NATSEnvClient], Coroutine[Any, Any, T]]) -> T:
    """Ask the bus from plain code, whether or not this thread has a running loop."""

    async def answer() -> T:
        async with connect() as client:
            return await question(client)

    with ThreadPoolExecutor(1, thread_name_prefix="envbus-remote") as executor:
        return executor.submit(lambda: asyncio.run(answer())).result()


def dataset_of(rows: list[Any]) -> Any:
    """A datasets.Dataset of them. Dicts with other keys in each row are kept as JSON, which row_of reads again."""
    from datasets import Dataset

    if any(row.get("info") for row in rows):
        rows = [{**row, "info": json.dumps(row.get("info") or {})} for row in rows]
    return Dataset.from_list(rows)


def row_of(example: Any) -> Any:
    """The input as the bus gave it."""
    info = example.get("info")
    return {**example, "info": json.loads(info)} if isinstance(info, str) else example


def config_of(client: Any) -> Any:
    """The config of a model client.

    Raises:
        ValueError: It was made from no config.
    """
    config = client._config if isinstance(client, Client) else client
    if not isinstance(config, ClientConfig):
        raise ValueError(f"client must have type ClientConfig for an env on the bus, got {type(client)}")
    return config


def _set_there(name: str, value: Any) -> str:
    return f"{name} = {value!r} must be set where the env is served: envbus serve -x '{json.dumps({name: value})}'"
