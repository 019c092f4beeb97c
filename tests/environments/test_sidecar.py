"""Sidecars: real server processes that belong to the process that started them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from envbus.demo_model import DemoModel
from envbus.environments import close_clients, load_environment
from envbus.environments.server_process import describe_end, own_import_paths
from envbus.environments.sidecar import Sidecar
from envbus.errors import (
    BusUnreachableError,
    EnvironmentCrashedError,
    EnvironmentNotFoundError,
    UsageError,
)
from envbus.types import ClientConfig

LOCAL_ENV = """
import os, sys
from envbus import SingleTurnEnv

def load_environment(crash="", secret=""):
    if crash:
        sys.stderr.write("the last words\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), 9)
    return SingleTurnEnv(dataset=[{"question": "Hello", "info": {"pid": os.getpid(), "secret": secret}}])
"""


@pytest.fixture(autouse=True)
def temporary_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of crashed servers are kept, but not on the machine that runs the tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def local_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment that only this process's sys.path leads to."""
    folder = tmp_path / "somewhere"
    folder.mkdir()
    (folder / "sidecar_local_env.py").write_text(LOCAL_ENV)
    monkeypatch.syspath_prepend(str(folder))
    return "sidecar-local-env"


def config(demo: DemoModel) -> ClientConfig:
    return ClientConfig(api_base_url=demo.base_url, api_key_var=None)


async def test_workers_find_what_this_process_imports_and_hide_their_arguments(
    local_env: str, nats_url: str, prefix: str, tmp_path: Path
) -> None:
    """Both workers serve; the log files are theirs alone; no argument shows in a command line."""
    log_file = tmp_path / "logs" / "server.log"
    sidecar = await Sidecar.start(
        local_env, {"secret": "hush"}, address=nats_url, prefix=prefix, workers=2, max_concurrent=1, log_file=log_file
    )
    try:
        while len(await sidecar.client.servers()) < 2:  # listens for a second each time
            pass
        [row] = await sidecar.client.examples()
        assert row["info"]["secret"] == "hush"
        assert row["info"]["pid"] in [process.pid for process in sidecar.processes]
        for process in sidecar.processes:
            command = " ".join(psutil.Process(process.pid).cmdline())
            assert "serve" in command
            assert "hush" not in command
            assert nats_url not in command
    finally:
        await sidecar.stop()
    assert [process.end for process in sidecar.processes] == ["exit code 0", "exit code 0"]
    assert [(tmp_path / "logs" / f"server-{i}.log").read_text().count("is ready") for i in (1, 2)] == [1, 1]


async def test_a_crash_while_loading_ends_the_wait_and_is_quoted(local_env: str) -> None:
    """P17: signal name and last log lines, at once."""
    with pytest.raises(EnvironmentCrashedError, match="signal SIGKILL") as caught:
        await Sidecar.start(local_env, {"crash": "yes"})
    assert "the last words" in str(caught.value)


async def test_load_errors_keep_their_type(local_env: str) -> None:
    with pytest.raises(EnvironmentNotFoundError, match="no module 'not_there'"):
        await Sidecar.start("not-there")
    with pytest.raises(UsageError, match="no setting 'nope'"):
        await Sidecar.start(local_env, extra_env_kwargs={"nope": 1})


async def test_arguments_are_checked_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="workers"):
        await Sidecar.start("reverse-text", workers=0)
    with pytest.raises(UsageError, match="JSON values"):
        await Sidecar.start("reverse-text", {"handle": object()})


async def test_a_wrong_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUS_CLIENT_CONNECT_TIMEOUT_S", "1")
    with pytest.raises(BusUnreachableError, match=r"127\.0\.0\.1:1\b"):
        await Sidecar.start("reverse-text", address="nats://127.0.0.1:1")


async def test_cancelling_the_start_leaves_nothing(local_env: str) -> None:
    """The leak check of the suite looks for processes."""
    starting = asyncio.create_task(Sidecar.start(local_env))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await starting


async def test_environment_start_server_runs_rollouts_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any key that this process has, and anywhere; but at no metadata service."""
    env = load_environment("reverse-text")
    monkeypatch.setenv("MY_LLM_KEY", "sk-of-the-parent")
    with DemoModel.start() as demo:
        await env.start_server()
        try:
            example = env.eval_examples()[0]
            output = await env.run_rollout(example, config(demo), "demo-model")
            results = await env.evaluate(config(demo), "demo-model", num_examples=2, rollouts_per_example=2)
            keyed = config(demo).model_copy(update={"api_key_var": "MY_LLM_KEY"})
            refused = keyed.model_copy(update={"api_base_url": "http://169.254.169.254/v1"})
            outputs = [await env.run_rollout(example, each, "demo-model") for each in (keyed, refused)]
        finally:
            await env.stop_server()
    assert output["error"] is None
    assert outputs[0]["error"] is None
    assert outputs[1]["error"] is not None
    assert outputs[1]["error"]["error"] == "ModelAddressError"
    assert [row["error"] for row in results["outputs"]] == [None] * 4
    assert demo.requests == 6


async def test_outputs_over_the_bus_are_those_of_a_local_run() -> None:
    """Same keys, types and values, but for times and the endpoint's own ids."""
    env = load_environment("calculator")
    sampling_args = {"seed": 7}
    with DemoModel.start() as demo:
        here = await env.evaluate(config(demo), demo.model, sampling_args, num_examples=3, max_concurrent=1)
        await env.start_server()
        there = await env.evaluate(config(demo), demo.model, sampling_args, num_examples=3, max_concurrent=1)
        await env.close()
        await close_clients()
    assert [shape(output) for output in there["outputs"]] == [shape(output) for output in here["outputs"]]
    same = ("example_id", "prompt", "answer", "info", "reward", "metrics", "stop_condition", "token_usage", "error")
    for local, remote in zip(here["outputs"], there["outputs"], strict=True):
        assert {name: remote[name] for name in same} == {name: local[name] for name in same}  # type: ignore[literal-required]


def shape(value: object) -> object:
    """Keys and types of a value, all the way down."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else type(value).__name__


@pytest.mark.parametrize(
    ("returncode", "text"), [(None, "still running"), (0, "exit code 0"), (-9, "signal SIGKILL"), (-99, "signal 99")]
)
def test_describe_end(returncode: int | None, text: str) -> None:
    assert describe_end(returncode) == text


def test_own_import_paths_leave_out_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    first.mkdir()
    last.mkdir()
    monkeypatch.setattr(sys, "path", [str(first), *sys.path, str(last), str(tmp_path / "missing")])
    before, after = own_import_paths()
    assert before[0] == str(first)
    assert after[-1] == str(last)
    assert not any("site-packages" in path or path.endswith("lib-dynload") for path in before + after)
    assert os.path.dirname(os.__file__) not in before + after
