"""How an environment of the classic library is found and hosted, with stand-ins for its classes: see tests/compat."""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from envbus.adapters.hosting import hosted, load_hosted
from envbus.adapters.verifiers.classic import ClassicHost
from envbus.environments import SingleTurnEnv, load_environment
from envbus.errors import EnvironmentCrashedError
from envbus.server.stops import LoadInterruptedError, Stops


class Environment:
    """As far as hosting looks at it."""

    sampling_args: dict[str, Any] = {"n": 1, "temperature": 0.5}  # noqa: RUF012

    def __init__(self, *envs: Environment, groups: bool = False) -> None:
        self.envs = list(envs)
        self.requires_group_rollouts = groups
        self.torn_down = 0
        self.ended: list[int] = []

    async def rollout(self, item: dict[str, Any]) -> int:
        try:
            await asyncio.sleep(item["wait_s"])
            raise ValueError("broken")
        finally:
            self.ended.append(item["example_id"])

    async def run_rollout(self, input: Any, client: Any, model: str, sampling_args: Any, **settings: Any) -> Any:
        return {"sampling_args": sampling_args, **settings}

    async def run_group(self, items: Any, client: Any, model: str, sampling_args: Any, **settings: Any) -> Any:
        return await asyncio.gather(*(self.rollout(item) for item in items))

    async def _teardown(self) -> None:
        self.torn_down += 1


Environment.__module__ = "verifiers.envs.environment"


class Special(Environment):
    pass


def test_the_class_tells() -> None:
    ours = SingleTurnEnv(dataset=[{"question": "q"}])

    assert isinstance(hosted(Special()), ClassicHost)
    assert hosted(ours) is ours


def test_group_rewards_deep_inside_count() -> None:
    inner = Environment(groups=True)

    assert ClassicHost(Environment(Environment(), Environment(inner))).requires_group_rollouts
    assert not ClassicHost(Environment(Environment())).requires_group_rollouts


async def test_sampling_arguments_are_put_together_as_the_library_does() -> None:
    output: Any = await ClassicHost(Environment()).run_rollout(
        {"prompt": [], "example_id": 0}, None, "m", {"temperature": 1, "seed": 2}, state_columns=["a"]
    )

    assert output["sampling_args"] == {"n": 1, "temperature": 1, "seed": 2}
    assert (output["max_retries"], output["state_columns"]) == (0, ["a"])


async def test_what_a_failed_group_leaves_running_ends_with_the_call() -> None:
    env = Environment()
    items: Any = [{"example_id": number, "wait_s": wait_s} for number, wait_s in enumerate([0, 60, 60])]

    with pytest.raises(ValueError, match="broken"):
        await ClassicHost(env).run_group(items, None, "m")

    assert sorted(env.ended) == [0, 1, 2]


async def test_the_teardown_of_all_runs_once_whatever_an_exit_hook_does() -> None:
    inner = Environment()
    outer = Environment(inner, inner)

    await ClassicHost(outer).close()
    await outer._teardown()
    await inner._teardown()

    assert (outer.torn_down, inner.torn_down) == (1, 1)


async def test_arguments_and_pools_are_set_as_the_library_s_own_servers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config map becomes the object that load_environment asks for; thread pools have room for all rollouts."""
    library, environments = ModuleType("verifiers.utils.env_utils"), ModuleType("configured_env")
    made: list[Any] = []

    def coerce(load: Any, signature: Any, env_args: dict[str, Any]) -> dict[str, Any]:
        assert list(signature.parameters) == ["config"]
        return {"config": frozenset(env_args["config"])}

    class Configured(Environment):
        def set_concurrency(self, concurrency: int) -> None:
            made.append(concurrency)

    def load_environment(config: Any) -> Environment:
        made.append(config)
        return Configured()

    library.coerce_typed_env_config = coerce  # type: ignore[attr-defined]
    environments.load_environment = load_environment  # type: ignore[attr-defined]
    environments.__spec__ = ModuleSpec("configured_env", None)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setitem(sys.modules, environments.__name__, environments)

    assert isinstance(load_hosted("configured-env", {"config": {"a": 1}}, max_concurrent=7), ClassicHost)
    assert made == [frozenset({"a"}), 7]


def test_a_module_inside_a_package_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_envs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text(
        textwrap.dedent("""
            from envbus.environments import SingleTurnEnv
            def load_environment():
                return SingleTurnEnv(dataset=[{"question": "q"}])
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    assert load_environment("package-of-envs.first").env_id == "package-of-envs.first"

    for name in ("package_of_envs.first", "package_of_envs"):
        del sys.modules[name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_reached_a_library_s_handler_still_interrupts_the_load(number: signal.Signals) -> None:
    """The classic library's handlers exit with 143, or interrupt."""

    def handler(*arguments: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(143)

    def load() -> None:
        signal.signal(number, handler)
        try:
            signal.raise_signal(number)
        except SystemExit as error:
            raise EnvironmentCrashedError("load_environment raised") from error

    with pytest.raises(LoadInterruptedError, match=number.name), Stops(handle_signals=True).while_loading():
        load()


def test_another_exit_is_a_crash() -> None:
    with pytest.raises(EnvironmentCrashedError), Stops(handle_signals=True).while_loading():
        raise EnvironmentCrashedError("load_environment raised") from SystemExit(1)
