"""What every environment can do beside running rollouts: generate, evaluate, and run them in a server process."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from envbus.environments.examples import Rows, as_inputs
from envbus.environments.model_client import close_clients
from envbus.errors import UsageError
from envbus.evaluation import EvalCallbacks, generate, repeat_examples
from envbus.types import EndpointConfig, GenerateOutputs, RolloutInput, RolloutRunner, SamplingArgs

if TYPE_CHECKING:
    from envbus.environments.sidecar import Sidecar

T = TypeVar("T")


class EvaluatingMixin(ABC):
    """generate and evaluate, their sync twins, and the server that rollouts go to once it is started."""

    env_id: str
    env_args: dict[str, Any]

    @property
    @abstractmethod
    def requires_group_rollouts(self) -> bool:
        """Whether scoring needs all rollouts of an example together."""

    @abstractmethod
    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """The evaluation examples."""

    def __init__(self) -> None:
        self.env_client: RolloutRunner | None = None
        """Where rollouts go instead of this process: set by start_server, or any client of a served environment."""
        self._sidecar: Sidecar | None = None

    async def generate(
        self,
        inputs: Rows | list[RolloutInput],
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        *,
        rollouts_per_example: int = 1,
        max_concurrent: int = -1,
        results_path: str | Path | None = None,
        state_columns: list[str] | None = None,
        save_results: bool = False,
        independent_scoring: bool = False,
        max_retries: int = 0,
        rollout_timeout_s: float | None = None,
        callbacks: EvalCallbacks | None = None,
    ) -> GenerateOutputs:
        """Run and score the inputs. Failed rollouts are outputs with an error; nothing else is lost by them.

        Args:
            inputs: The examples, each ``rollouts_per_example`` times in a row.
            client: An AsyncOpenAI or a ClientConfig; with a server a ClientConfig.
            model: The model's name at its endpoint.
            sampling_args: For the model calls; they win over those of the environment.
            rollouts_per_example: Size of a group.
            max_concurrent: Rollouts at a time, scoring included; no limit if not positive.
            results_path: Directory for the results.
            state_columns: Further keys of the state to put into the outputs.
            save_results: Write results.jsonl and metadata.json.
            independent_scoring: Run the rollouts of an example one by one; not with group reward functions.
            max_retries: Per rollout, after an InfraError or InvalidModelResponseError.
            rollout_timeout_s: Limit per rollout.
            callbacks: Hooks for displays.
        """
        if independent_scoring and self.requires_group_rollouts:
            raise UsageError("the rubric has group reward functions: independent_scoring is not possible")
        return await generate(
            cast(RolloutRunner, self),
            as_inputs(inputs),
            client,
            model,
            sampling_args,
            env_id=self.env_id,
            env_args=self.env_args,
            rollouts_per_example=rollouts_per_example,
            group_scoring=self.requires_group_rollouts and not independent_scoring,
            max_concurrent=max_concurrent,
            results_path=results_path,
            state_columns=state_columns,
            save_results=save_results,
            max_retries=max_retries,
            rollout_timeout_s=rollout_timeout_s,
            callbacks=callbacks,
        )

    async def evaluate(
        self,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        **settings: Any,
    ) -> GenerateOutputs:
        """Run and score the evaluation set.

        Args:
            client: An AsyncOpenAI or a ClientConfig; with a server a ClientConfig.
            model: The model's name at its endpoint.
            sampling_args: For the model calls; they win over those of the environment.
            num_examples: The first so many examples; all if negative.
            rollouts_per_example: Rollouts of each.
            **settings: Those of generate.
        """
        examples = as_inputs(self.get_eval_dataset(num_examples))
        inputs = repeat_examples(examples, rollouts_per_example)
        return await self.generate(
            inputs, client, model, sampling_args, rollouts_per_example=rollouts_per_example, **settings
        )

    def generate_sync(self, *args: Any, **settings: Any) -> GenerateOutputs:
        """Generate for code without an event loop; the arguments are the same."""
        return _run_sync(lambda: self.generate(*args, **settings))

    def evaluate_sync(self, *args: Any, **settings: Any) -> GenerateOutputs:
        """Evaluate for code without an event loop; the arguments are the same."""
        return _run_sync(lambda: self.evaluate(*args, **settings))

    async def start_server(
        self,
        address: str | None = None,
        *,
        workers: int = 1,
        max_concurrent: int | None = None,
        allow_keys: Sequence[str] = (),
        allow_urls: Sequence[str] = (),
        extra_env_kwargs: Mapping[str, Any] | None = None,
        log_file: str | Path | None = None,
        startup_timeout_s: float = 600.0,
    ) -> None:
        """Serve this environment from processes of its own; rollouts then go to them until stop_server.

        The servers load the environment by its env_id and env_args: what was changed on this object stays here.

        Args:
            address: NATS URL; without one the processes get a bus of their own.
            workers: Server processes.
            max_concurrent: Rollouts at a time per process.
            allow_keys: ``"VARIABLE=ORIGIN"`` pairs: which API keys the servers may use, and for which endpoints;
                by default none with an address, and all that this process has, anywhere, without one.
            allow_urls: Patterns of URLs that the servers may call without a key; by default as for allow_keys.
            extra_env_kwargs: Settings of the environment in the servers; see set_kwargs.
            log_file: Where the servers log.
            startup_timeout_s: How long loading the environment may take.
        """
        from envbus.environments.sidecar import Sidecar

        if self._sidecar is not None:
            raise UsageError("the server is already started; stop_server() ends it")
        if not self.env_id:
            raise UsageError(
                "start_server needs an env_id that load_environment can find; load the environment with it"
            )
        self._sidecar = await Sidecar.start(
            self.env_id,
            self.env_args,
            address=address,
            workers=workers,
            max_concurrent=max_concurrent,
            allow_keys=allow_keys,
            allow_urls=allow_urls,
            extra_env_kwargs=extra_env_kwargs,
            log_file=log_file,
            startup_timeout_s=startup_timeout_s,
        )
        self.env_client = self._sidecar.client

    async def stop_server(self) -> None:
        """Stop what start_server started; rollouts then run in this process again."""
        sidecar, self._sidecar = self._sidecar, None
        if sidecar is not None:
            self.env_client = None
            await sidecar.stop()

    def _remote(self, runner: RolloutRunner, client: Any) -> RolloutRunner:
        if not isinstance(client, EndpointConfig):
            raise UsageError(
                f"rollouts run in server processes: pass a ClientConfig instead of a {type(client).__name__} as client"
            )
        return runner


def _run_sync(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end in an event loop of its own; in a thread where this one has a running loop (notebooks)."""

    async def run() -> T:
        try:
            return await work()
        finally:
            await close_clients()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1, thread_name_prefix="envbus-sync") as executor:
        return executor.submit(lambda: asyncio.run(run())).result()
