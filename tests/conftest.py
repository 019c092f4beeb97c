"""What every test gets: a real nats-server, a prefix of its own, a clean environment, a check for leaks."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psutil
import pytest
import server_forks
from cli_forks import CliForks
from hypothesis import settings as hypothesis_settings

from envbus.bus.embedded import EmbeddedNats

# How long an example takes says more about the machine than about the code. CI repeats the same examples, so that a
# change is judged by itself; new ones are looked for on the developers' machines.
hypothesis_settings.register_profile("envbus", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis_settings.load_profile("envbus")

T = TypeVar("T")
SETTLE_S = 10.0
"""How long a test's threads, processes and tasks may take to end after it."""
LONG_FILES = (
    "test_controller_live.py",
    "test_controller_up.py",
    "test_chaos_run.py",
    "test_fleet_storm.py",
    "test_operator_commands.py",
    "test_operator_fleet.py",
    "test_docs_code.py",
    "test_dashboard_browser.py",
    "test_many_jobs.py",
    "test_cases_fleet.py",
    "test_cases_cli.py",
    "test_partition.py",
    "test_gateway_failures.py",
    "test_cli_fleet.py",
    "test_cli_eval.py",
    "test_sidecar.py",
    "test_nodes.py",
    "test_slurm.py",
    "test_nats_readme.py",
    "test_containers_run.py",
    "test_shared_fleet.py",
    "test_isolation.py",
)
"""Half a minute and more, the longest first: one that began last would be waited for by idle workers."""


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the user's NATS or Hugging Face settings, nor reaches for the network's data sets."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("ENVBUS_") or name == "NATS_URL":
                patch.delenv(name)
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("HF_HOME", str(home / "huggingface"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="session")
def session_nats(clean_environment: None) -> Iterator[EmbeddedNats]:
    """The suite's nats-server; never stop it, use own_nats for that."""
    nats = run_in_thread(EmbeddedNats.start)
    yield nats
    run_in_thread(nats.stop)


@pytest.fixture(scope="session")
def cli_forks(clean_environment: None) -> Iterator[CliForks]:
    """Runs command lines without the time of their imports."""
    forks = CliForks()
    yield forks
    forks.close()


@pytest.fixture
def nats_url(session_nats: EmbeddedNats) -> str:
    """Address of the suite's nats-server."""
    return session_nats.url


@pytest.fixture
async def own_nats() -> AsyncIterator[EmbeddedNats]:
    """A nats-server that only this test uses: it may kill() and restart() it."""
    async with EmbeddedNats() as nats:
        yield nats


@pytest.fixture
def prefix() -> str:
    """A subject prefix that no other test uses: one token."""
    return f"t{secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, clean_environment: None) -> Iterator[None]:
    """Fail a test that leaves a thread or a child process behind, or this process other than it was."""
    if {"nats_url", "session_nats"} & set(request.fixturenames):
        request.getfixturevalue("session_nats")
    threads, children, state = live_threads(), live_children(), process_state()
    yield
    deadline = time.monotonic() + SETTLE_S
    for thread in live_threads() - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left_threads = live_threads() - threads
    # Waiting for a direct child would reap it, which is the test's own duty.
    psutil.wait_procs(live_children() - children - set(psutil.Process().children()), timeout=SETTLE_S)
    left_children = live_children() - children
    assert not left_threads, f"threads left behind: {[thread.name for thread in left_threads]}"
    assert not left_children, f"child processes left behind: {[describe_process(child) for child in left_children]}"
    assert process_state() == state, "changed for the tests that follow"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first; have every async test checked for tasks that it leaves behind."""
    items.sort(key=lambda item: LONG_FILES.index(item.path.name) if item.path.name in LONG_FILES else len(LONG_FILES))
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = without_task_leaks(item.obj)


def pytest_sessionfinish() -> None:
    for forks in server_forks.started():
        forks.close()


def without_task_leaks(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Fail the test if tasks that it started still run after it; those of its fixtures are theirs."""

    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        before = asyncio.all_tasks()
        try:
            await test(*args, **kwargs)
        finally:
            await close_local_clients()
        left = asyncio.all_tasks() - before
        if left:
            _, left = await asyncio.wait(left, timeout=SETTLE_S)
        assert not left, f"tasks left behind: {[str(task.get_coro()) for task in left]}"

    return checked


async def close_local_clients() -> None:
    """Model clients that were made in a test's loop end with it: garbage later, they would fail another test."""
    if (module := sys.modules.get("envbus.environments.model_client")) is not None:
        await module.close_clients()


def run_in_thread(function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function in an event loop of its own, whatever loop this thread has."""

    async def call() -> T:
        return await function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, call()).result()


def live_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def process_state() -> dict[str, Any]:
    """What a test could change for those after it."""
    log = logging.getLogger("envbus")
    return {
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "folder": os.getcwd(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith(("ENVBUS_", "NATS_"))},
        "logger": (log.level, log.propagate, log.disabled),
    }


def live_children() -> set[psutil.Process]:
    """This process's descendants, zombies included: they wait to be reaped."""
    children = psutil.Process().children(recursive=True)
    kept = {forks.pid for forks in server_forks.started()}
    return {c for c in children if c.pid not in kept and "multiprocessing" not in describe_process(c)}


def describe_process(process: psutil.Process) -> str:
    """Its command line. Python's own resource tracker and fork server live as long as the process."""
    try:
        return " ".join(process.cmdline()) or f"{process.name()} ({process.status()})"
    except psutil.Error:
        return f"process {process.pid}"
