"""EnvGroup: several environments as one; each example goes to the environment that it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from envbus.environments.environment import Environment
from envbus.environments.examples import as_inputs
from envbus.environments.rubric import Rubric
from envbus.environments.running import Call
from envbus.environments.state import State
from envbus.errors import UsageError
from envbus.types import RolloutInput, RolloutOutput, SamplingArgs


class EnvGroup(Environment):
    """A mixture of environments.

    Its datasets are those of its environments, one after the other. ``env_id`` of a row names its environment, and
    ``example_id`` is ``"<name>/<id there>"``, unique in the whole set. Prompts, rubrics, limits and sampling defaults
    are those of the environments.

    Args:
        envs: The environments.
        env_names: Their names, unique; by default their env_ids if those are all set and unique, else env_0, env_1...
        env_id: Name of the group.
        env_args: Its arguments.
    """

    def __init__(
        self,
        envs: Sequence[Environment],
        env_names: Iterable[str] | None = None,
        *,
        env_id: str = "",
        env_args: dict[str, Any] | None = None,
    ) -> None:
        names = list(env_names) if env_names is not None else _default_names(envs)
        if not envs or len(names) != len(envs) or len(set(names)) != len(names) or not all(names):
            raise UsageError(f"EnvGroup needs at least one environment and one unique name for each; got {names}")
        if any("/" in name for name in names):
            raise UsageError(f"names of an EnvGroup cannot contain '/': {names}")
        self.envs = dict(zip(names, envs, strict=True))
        super().__init__(self._train_rows, self._eval_rows, rubric=Rubric(), env_id=env_id, env_args=env_args)

    @property
    def requires_group_rollouts(self) -> bool:
        """Whether some environment needs all rollouts of an example together."""
        return any(env.requires_group_rollouts for env in self.envs.values())

    async def rollout(
        self, input: RolloutInput, client: Any, model: str, sampling_args: SamplingArgs | None = None
    ) -> State:
        """The unscored rollout of the example's environment."""
        env, child_input = self._routed(input)
        return await env.rollout(child_input, client, model, sampling_args)

    async def run_rollout_here(self, input: RolloutInput, call: Call) -> RolloutOutput:
        """Run the rollout in the example's environment."""
        env, child_input = self._routed(input)
        return _labelled(await env.run_rollout(child_input, *call.arguments), input)

    async def run_group_here(self, group_inputs: list[RolloutInput], call: Call) -> list[RolloutOutput]:
        """Run the group in its example's environment."""
        routed = [self._routed(input) for input in group_inputs]
        if len({id(env) for env, _ in routed}) > 1:
            raise UsageError("the inputs of a group must all be of the same environment")
        if not routed:
            return []
        outputs = await routed[0][0].run_group([child_input for _, child_input in routed], *call.arguments)
        return [_labelled(output, input) for output, input in zip(outputs, group_inputs, strict=True)]

    def add_rubric(self, rubric: Rubric) -> None:
        """Score with this rubric too, in every environment."""
        for env in self.envs.values():
            env.add_rubric(rubric)

    def set_kwargs(self, **settings: Any) -> None:
        """Set attributes of every environment."""
        for env in self.envs.values():
            env.set_kwargs(**settings)

    async def close(self) -> None:
        """Close every environment, once."""
        await super().close()
        for env in self.envs.values():
            await env.close()

    def _train_rows(self) -> list[dict[str, Any]]:
        return self._rows({name: env for name, env in self.envs.items() if env.dataset is not None}, train=True)

    def _eval_rows(self) -> list[dict[str, Any]]:
        return self._rows(self.envs, train=False)

    @staticmethod
    def _rows(envs: dict[str, Environment], *, train: bool) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for name, env in envs.items():
            for row in as_inputs(env.get_dataset() if train else env.get_eval_dataset()):
                inner = f"/{row['env_id']}" if isinstance(env, EnvGroup) else ""
                rows.append({**row, "env_id": f"{name}{inner}", "example_id": f"{name}/{row['example_id']}"})
        return rows

    def _routed(self, input: RolloutInput) -> tuple[Environment, RolloutInput]:
        name, _, inner = str(input.get("env_id") or "").partition("/")
        env = self.envs.get(name)
        if env is None:
            raise UsageError(f"env_id {name!r} of the input is none of this group's: {', '.join(self.envs)}")
        child_input = {key: value for key, value in input.items() if key != "env_id"}
        return env, cast(RolloutInput, {**child_input, "env_id": inner} if inner else child_input)


def _default_names(envs: Sequence[Environment]) -> list[str]:
    ids = [env.env_id.rpartition("/")[2] for env in envs]
    return ids if all(ids) and len(set(ids)) == len(ids) else [f"env_{i}" for i in range(len(envs))]


def _labelled(output: RolloutOutput, input: RolloutInput) -> RolloutOutput:
    return {**output, "env_id": input["env_id"]}
