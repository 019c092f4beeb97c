"""Environment: a dataset, a way to roll out its examples, and a rubric; the base of every kind of environment.

It turns failures into outputs and runs hooks. It does not limit concurrency or save results (envbus.evaluation does).
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from envbus.environments import running
from envbus.environments.evaluating import EvaluatingMixin
from envbus.environments.examples import DatasetSource, Rows, as_inputs, prepared, selected
from envbus.environments.hooks import find_hooks, settled
from envbus.environments.model_call import ChatResult, chat
from envbus.environments.parsers import Parser
from envbus.environments.progress import reporting_here
from envbus.environments.rubric import Rubric, RubricGroup
from envbus.environments.running import Call
from envbus.environments.stages import TEARDOWN_LIMIT_S, finish
from envbus.environments.state import State, new_state
from envbus.error_chain import ErrorChain
from envbus.errors import UsageError
from envbus.evaluation.calls import reports_progress
from envbus.types import Messages, OnProgress, RolloutInput, RolloutOutput, RolloutRunner, SamplingArgs

logger = logging.getLogger(__name__)


class Environment(EvaluatingMixin):
    """Base of all environments; see docs/environments.md for how to write one.

    Most authors subclass SingleTurnEnv, MultiTurnEnv or ToolEnv.

    Args:
        dataset: Examples to train on: a datasets.Dataset, a list of dicts, or a function that builds one when it is
            first needed. A row has ``prompt`` (messages or text) or ``question``; and, as they apply, ``answer``,
            ``info``, ``example_id`` (unique; rows are numbered where it is missing) and further columns.
        eval_dataset: Examples to evaluate on; without it the training examples are used.
        system_prompt: Put before prompts that do not start with a system message.
        few_shot: Messages put before each ``question`` (not before a ready ``prompt``).
        rubric: Scores the rollouts; without one every reward is 0.
        parser: Finds answers in completions; that of the rubric by default.
        sampling_args: Defaults for model calls; those of a call win.
        tool_defs: Tools offered to the model, in OpenAI's form. ``info["tool_defs"]`` of an example replaces them.
        timeout_seconds: Limit for a rollout's setup and generation, and again for its scoring.
        env_id: Name of the environment; load_environment sets it.
        env_args: Arguments it was made with; load_environment sets them.
    """

    def __init__(
        self,
        dataset: DatasetSource | None = None,
        eval_dataset: DatasetSource | None = None,
        *,
        system_prompt: str | None = None,
        few_shot: Messages | None = None,
        rubric: Rubric | None = None,
        parser: Parser | None = None,
        sampling_args: SamplingArgs | None = None,
        tool_defs: list[dict[str, Any]] | None = None,
        timeout_seconds: float | None = None,
        env_id: str = "",
        env_args: dict[str, Any] | None = None,
    ) -> None:
        if dataset is None and eval_dataset is None:
            raise UsageError("an environment needs a dataset or an eval_dataset")
        super().__init__()
        self.system_prompt = system_prompt
        self.few_shot = few_shot
        if rubric is None:
            logger.warning("environment %s has no rubric: every reward is 0", env_id or type(self).__name__)
        self.rubric = rubric or Rubric(parser=parser)
        self.parser = parser or self.rubric.parser
        self.sampling_args: SamplingArgs = dict(sampling_args or {})
        self.tool_defs: list[dict[str, Any]] = list(tool_defs or [])
        self.timeout_seconds = timeout_seconds
        self.env_id = env_id
        self.env_args: dict[str, Any] = dict(env_args or {})
        self.dataset = None if dataset is None else self._opened(dataset)
        self.eval_dataset = None if eval_dataset is None else self._opened(eval_dataset)
        self._eval_examples: list[RolloutInput] | None = None
        self._closed = False

    # -- data

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """The first ``n`` training examples (all if negative), shuffled if a seed is given; always a new object."""
        if self.dataset is None:
            raise UsageError(f"environment {self.env_id or type(self).__name__} has no training dataset")
        self.dataset = self._built(self.dataset)
        return selected(self.dataset, n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Like get_dataset, of the evaluation examples; the training examples where there are no others."""
        if self.eval_dataset is None:
            return self.get_dataset(n, seed)
        self.eval_dataset = self._built(self.eval_dataset)
        return selected(self.eval_dataset, n, seed)

    def eval_examples(self) -> Sequence[RolloutInput]:
        """The evaluation set as rollout inputs, not to be changed; may load data on first use."""
        if self._eval_examples is None:
            self._eval_examples = as_inputs(self.get_eval_dataset())
        return self._eval_examples

    def _opened(self, source: DatasetSource) -> DatasetSource:
        return source if callable(source) else self._built(lambda: source)

    def _built(self, source: DatasetSource) -> Rows:
        if not callable(source):
            return source
        return prepared(source, system_prompt=self.system_prompt, few_shot=self.few_shot)

    # -- running

    @property
    def requires_group_rollouts(self) -> bool:
        """Whether scoring needs all rollouts of an example together."""
        return self.rubric.has_group_rewards

    async def run_rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> RolloutOutput:
        """Run and score one rollout. A failed one is an output with ``error`` set and ``reward`` None.

        Args:
            input: The example.
            client: An AsyncOpenAI or a ClientConfig.
            model: The model's name at its endpoint.
            sampling_args: For the model calls; they win over those of the environment.
            max_retries: How often to try again, scoring included, after an InfraError or InvalidModelResponseError.
            state_columns: Further keys of the state to put into the output.
            on_progress: Called with what the rollout reports while it runs, e.g. each turn.

        Raises:
            UsageError: The rubric needs groups.
        """
        call = Call(client, model, sampling_args, max_retries, state_columns)
        if self.env_client is not None:
            runner = self._remote(self.env_client, client)
            return await runner.run_rollout(input, *call.arguments, **_watching(runner, on_progress))
        with reporting_here(on_progress):
            return await self.run_rollout_here(input, call)

    async def run_group(
        self,
        group_inputs: list[RolloutInput],
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
        *,
        on_progress: OnProgress | None = None,
    ) -> list[RolloutOutput]:
        """Run rollouts of one example at the same time and score them together; outputs in input order.

        A member that fails keeps its error and is left out of scoring; the others go on, and group reward functions
        get only the survivors. Arguments are those of run_rollout; a member's generation is tried again on its own,
        scoring is done once.
        """
        call = Call(client, model, sampling_args, max_retries, state_columns)
        if self.env_client is not None:
            runner = self._remote(self.env_client, client)
            return await runner.run_group(group_inputs, *call.arguments, **_watching(runner, on_progress))
        with reporting_here(on_progress):
            return await self.run_group_here(group_inputs, call)

    @abstractmethod
    async def rollout(
        self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None = None
    ) -> State:
        """Generate one rollout, unscored: init_state, then run_stages with what generates, return the state.

        What it raises becomes the rollout's error. run_stages also gives the time limit, setup_state and the cleanup
        hooks, and keeps what was generated before a failure.
        """

    def init_state(
        self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None = None
    ) -> State:
        """The state that a rollout starts with; see envbus.environments.state for its keys."""
        sampling = {**self.sampling_args, **(sampling_args or {})}
        state = new_state(input, client=client, model=model, sampling_args=sampling)
        state["tool_defs"] = state["info"].get("tool_defs") or self.tool_defs
        return state

    async def setup_state(self, state: State) -> None:
        """Hook: prepare a rollout, e.g. start its sandbox. Change the state in place."""

    async def run_rollout_here(self, input: RolloutInput, call: Call) -> RolloutOutput:
        """run_rollout in this process, server or not; EnvGroup overrides it."""
        return await running.run_rollout(self, input, call)

    async def run_group_here(self, group_inputs: list[RolloutInput], call: Call) -> list[RolloutOutput]:
        """run_group in this process, server or not; EnvGroup overrides it."""
        return await running.run_group(self, group_inputs, call)

    async def run_stages(self, state: State, generate: Callable[[State], Awaitable[None]]) -> None:
        """Run setup_state and ``generate`` within the time limit, then the cleanup hooks, whatever happens."""
        await running.run_stages(self, state, generate)

    async def is_completed(self, state: State) -> bool:
        """Ask the stop conditions; the first that says yes becomes the state's ``stop_condition``."""
        for condition in find_hooks(self, "stop"):
            if await settled(condition(state)):
                state["is_completed"], state["stop_condition"] = True, condition.__name__
                return True
        return False

    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        *,
        client: Any = None,
        model: str | None = None,
        sampling_args: SamplingArgs | None = None,
        tool_defs: list[dict[str, Any]] | None = None,
    ) -> ChatResult:
        """Call the model once, by default as the rollout's caller wants it, and count its time and tokens."""
        started = time.perf_counter()
        try:
            result = await chat(
                client if client is not None else state["client"],
                model or state["model"],
                prompt,
                state["sampling_args"] if sampling_args is None else sampling_args,
                state["tool_defs"] if tool_defs is None else tool_defs,
            )
        finally:
            state["timing"]["model_s"] += time.perf_counter() - started
        _count_tokens(state, result)
        return result

    # -- settings and end

    def add_rubric(self, rubric: Rubric) -> None:
        """Score with this rubric too."""
        self.rubric = RubricGroup([self.rubric, rubric])

    def set_kwargs(self, **settings: Any) -> None:
        """Set public attributes by name, through ``set_<name>`` where the environment has such a method.

        Raises:
            UsageError: The environment has no attribute of that name.
        """
        for name, value in settings.items():
            setter = getattr(self, f"set_{name}", None)
            if callable(setter):
                setter(value)
            elif name.startswith("_") or name not in vars(self):
                known = ", ".join(sorted(key for key in vars(self) if not key.startswith("_")))
                raise UsageError(f"{type(self).__name__} has no setting {name!r}; it has: {known}")
            else:
                setattr(self, name, value)

    async def close(self) -> None:
        """Stop the server if one was started and run the teardown hooks, the rubric's first; once."""
        if self._closed:
            return
        self._closed = True
        await self.stop_server()
        await finish(self._tear_down(), limit_s=TEARDOWN_LIMIT_S)

    async def _tear_down(self) -> None:
        for hook in (self.rubric.teardown, *find_hooks(self, "teardown")):
            try:
                await settled(hook())
            except Exception as error:
                logger.exception(
                    "teardown hook of %s failed: %r", self.env_id or type(self).__name__, ErrorChain(error)
                )


def _watching(runner: RolloutRunner, on_progress: OnProgress | None) -> dict[str, Any]:
    """What is passed on only when somebody asks, and only to a runner that knows of it."""
    return {"on_progress": on_progress} if on_progress is not None and reports_progress(runner) else {}


def _count_tokens(state: State, result: ChatResult) -> None:
    if result.usage is None:
        return
    total = state["token_usage"] or {"input_tokens": 0, "output_tokens": 0}
    state["token_usage"] = {name: total[name] + result.usage[name] for name in ("input_tokens", "output_tokens")}
