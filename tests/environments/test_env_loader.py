from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from envbus.environments import SingleTurnEnv, add_env_dir, check_hostable, load_environment
from envbus.environments.loader import apply_settings
from envbus.errors import (
    EnvArgsError,
    EnvironmentCrashedError,
    EnvironmentLoadError,
    EnvironmentNotFoundError,
    LoaderMissingError,
    UsageError,
)
from envbus.types import HostableEnvironment

GOOD = """
    from envbus.environments import SingleTurnEnv
    def load_environment(size: int = 1, *, env_id="mine"):
        return SingleTurnEnv(dataset=[{"question": "q"}] * size)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Put a module on the path, and take it out of sys.modules afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))

    yield write
    for name in set(sys.modules) - before:
        if not name.startswith(("envbus", "reasoning_gym")):
            del sys.modules[name]


@pytest.mark.parametrize("env_id", ["my-env", "my_env", "owner/my-env", "owner/my-env@1.2.0", "my-env@latest"])
def test_ids_name_modules(install, env_id: str) -> None:  # type: ignore[no-untyped-def]
    install("my_env", GOOD)

    env = load_environment(env_id, size=3)

    assert isinstance(env, SingleTurnEnv)
    assert (env.env_id, env.env_args) == (env_id, {"size": 3})
    assert check_hostable(env) == []
    assert isinstance(env, HostableEnvironment)


def test_a_name_that_the_environment_gave_itself_stays(install) -> None:  # type: ignore[no-untyped-def]
    install("named", GOOD.replace("* size)", "* size, env_id='own', env_args={'a': 1})"))

    assert (load_environment("named").env_id, load_environment("named").env_args) == ("own", {"a": 1})


@pytest.mark.parametrize("env_id", ["no-such-env", "", "a b", "../x", "owner/", "@1", "a.b", "class"])
def test_a_missing_package(env_id: str) -> None:
    with pytest.raises(EnvironmentNotFoundError):
        load_environment(env_id)


def test_a_missing_function(install) -> None:  # type: ignore[no-untyped-def]
    install("collision", "load_environment = 5")

    with pytest.raises(LoaderMissingError, match=r"collision\.py"):
        load_environment("collision")


@pytest.mark.parametrize("arguments", [{"sise": 3}, {"size": 1, "more": 2}])
def test_a_bad_argument(install, arguments: dict[str, int]) -> None:  # type: ignore[no-untyped-def]
    install("my_env", GOOD)

    with pytest.raises(EnvArgsError, match="it takes: size, env_id"):
        load_environment("my-env", **arguments)


def test_a_missing_argument(install) -> None:  # type: ignore[no-untyped-def]
    install("my_env", GOOD.replace("size: int = 1", "size"))

    with pytest.raises(EnvArgsError, match="'size'"):
        load_environment("my-env")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_dependency", "ModuleNotFoundError"),
        ("from json import no_such_name", "ImportError"),
        ("this is no python", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("def load_environment(): raise SystemExit", "SystemExit"),
        ("def load_environment(a=1): return len(a)", "TypeError"),
        ("def load_environment():\n    import no_such_dependency", "ModuleNotFoundError"),
        ("def load_environment():\n    try: 1 / 0\n    except Exception as e: raise KeyError('k') from e", "KeyError"),
        (
            "def load_environment():\n    from envbus import environments\n    environments.load_environment('no-x')",
            "EnvironmentNotFoundError",
        ),
        ("def load_environment(): raise ValueError('x' * 1_000_000)", "ValueError"),
    ],
)
def test_an_exception_inside(install, source: str, cause: str) -> None:  # type: ignore[no-untyped-def]
    install("crashing", source)

    with pytest.raises(EnvironmentCrashedError, match=cause) as caught:
        load_environment("crashing")
    assert type(caught.value.__cause__).__name__ == cause
    assert len(str(caught.value)) < 1_000


def test_loading_nothing_is_a_crash(install) -> None:  # type: ignore[no-untyped-def]
    install("nothing", "def load_environment(): pass")

    with pytest.raises(EnvironmentCrashedError, match="None"):
        load_environment("nothing")


def test_foreign_objects_are_loaded_and_checked(install) -> None:  # type: ignore[no-untyped-def]
    install(
        "foreign",
        """
        class Env:
            __slots__ = ()
            requires_group_rollouts = False
            run_group = None
            async def run_rollout(self): ...
        def load_environment(): return Env()
        """,
    )

    assert check_hostable(load_environment("foreign")) == ["run_group", "eval_examples", "close"]


def test_settings_need_an_environment_that_takes_them() -> None:
    env = SingleTurnEnv(dataset=[{"question": "q"}])
    apply_settings(env, {"timeout_seconds": 2.0})
    assert env.timeout_seconds == 2.0
    apply_settings(object(), {})
    with pytest.raises(UsageError, match="set_kwargs"):
        apply_settings(object(), {"a": 1})


def test_installed_modules_win_over_bundled_ones(install) -> None:  # type: ignore[no-untyped-def]
    install("calculator", GOOD)
    assert len(load_environment("calculator", size=3).get_dataset()) == 3


def test_a_module_without_loader_does_not_hide_a_bundled_environment(install) -> None:  # type: ignore[no-untyped-def]
    """The reasoning_gym package is no environment; ours of that name is meant."""
    install("calculator", "x = 1")
    assert load_environment("calculator", num_eval_examples=2).env_id == "calculator"


def test_environment_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "folder_env").mkdir()
    (tmp_path / "folder_env" / "folder_env.py").write_text(textwrap.dedent(GOOD))
    (tmp_path / "file_env.py").write_text(textwrap.dedent(GOOD))

    for env_id in ("file-env", "owner/folder-env"):
        add_env_dir(tmp_path, env_id)
        assert load_environment(env_id).env_id == env_id


def test_every_failure_is_a_load_error() -> None:
    for error in (EnvironmentNotFoundError, LoaderMissingError, EnvArgsError, EnvironmentCrashedError):
        assert issubclass(error, EnvironmentLoadError)


def test_importing_environments_is_light() -> None:
    """Neither the client library of the model nor datasets, until they are needed."""
    code = (
        "import sys, envbus.environments as e; e.load_environment('reverse-text'); e.load_environment('gsm8k');"
        "print([m for m in ('openai', 'datasets', 'math_verify', 'numpy', 'nats') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"
