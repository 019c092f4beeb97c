"""P33: what a rollout took is free again once its reply was confirmed, on the server and at the client.

The server runs in this process, so that its objects can be counted; the bus between
the two is a real one. bench/memory.py shows the resident memory of separate processes.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from stage import becomes, run, settled

from envbus import NATSEnvClient, NATSEnvServer
from envbus.evaluation import generate, load_results
from envbus.types import RolloutInput

STATE_BYTES, RESULT_BYTES = 5_000_000, 100_000
AT_ONCE = 8
FEW, MANY = 60, 240
SLACK_BYTES = 50_000
"""Half a result: what comes and goes in the background."""


class State:
    """What an environment keeps of one rollout while it runs."""

    def __init__(self) -> None:
        self.pages = bytes(STATE_BYTES)


class StateEnv:
    requires_group_rollouts = False

    def __init__(self) -> None:
        self.states: weakref.WeakSet[State] = weakref.WeakSet()
        self.most = 0

    async def run_rollout(self, item: Any, *args: Any, **kwargs: Any) -> Any:
        if item["do"] == "small":
            return {"example_id": item["example_id"], "reward": 1.0, "completion": "x" * RESULT_BYTES}
        state = State()
        self.states.add(state)
        self.most = max(self.most, len(self.states))
        await asyncio.sleep(60 if item["do"] == "hang" else 0.001)
        if item["do"] == "fail":
            raise ValueError("the traceback of this holds the state")
        return {"example_id": item["example_id"], "reward": 1.0, "completion": state.pages[: item["size"]]}

    async def run_group(self, items: Any, *args: Any, **kwargs: Any) -> Any:
        return [await self.run_rollout(item) for item in items]

    def eval_examples(self) -> list[Any]:
        return []

    async def close(self) -> None:
        pass


def do(what: str, number: int = 0, *, size: int = RESULT_BYTES) -> Any:
    return {"prompt": [{"role": "user", "content": "x" * 1_000}], "example_id": number, "do": what, "size": size}


@asynccontextmanager
async def served(env: StateEnv, url: str, prefix: str) -> AsyncIterator[tuple[NATSEnvClient, NATSEnvServer]]:
    own_url = url.replace("nats://", "nats://server:any@")  # else both sides would share one connection
    server = NATSEnvServer(
        "state-env", address=own_url, prefix=prefix, environment=env, max_concurrent=AT_ONCE, handle_signals=False
    )
    running = asyncio.create_task(server.run())
    try:
        async with NATSEnvClient(url, "state-env", prefix=prefix) as client:
            await client.wait_for_server()
            yield client, server
    finally:
        await server.close()
        await running


async def all_of(client: NATSEnvClient, what: str, count: int) -> None:
    """Run so many rollouts, 16 at a time, and keep nothing of them."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await run(client, do(what, number))

    await asyncio.gather(*(worker() for _ in range(16)))


async def confirmed(client: NATSEnvClient, server: NATSEnvServer) -> None:
    """Wait until neither side has anything pending."""
    await settled(client)
    desks = server._desks
    assert desks is not None
    await becomes(lambda: not len(desks.reception.jobs))
    gc.collect()


def pending(client: NATSEnvClient) -> list[str]:
    """Jobs that no server has accepted."""
    assert client._session is not None
    return client._session._dispatch.pending()


def in_flight(client: NATSEnvClient) -> list[str]:
    """Jobs that a server has accepted."""
    assert client._session is not None
    return [job for jobs in client._session._attempts.holders().values() for job in jobs]


def unreachable(env: StateEnv) -> bool:
    gc.collect()
    return len(env.states) == 0


@contextmanager
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


async def test_many_rollouts_leave_nothing_on_either_side(nats_url: str, prefix: str) -> None:
    """P33: after three times as many rollouts of 100 KB, no more memory is in use."""
    async with served(StateEnv(), nats_url, prefix) as (client, server):
        await all_of(client, "small", FEW)
        with traced():
            await all_of(client, "small", FEW)
            await confirmed(client, server)
            before, _ = tracemalloc.get_traced_memory()
            await all_of(client, "small", MANY)
            await confirmed(client, server)
            after, _ = tracemalloc.get_traced_memory()
        assert after - before < SLACK_BYTES


async def test_no_state_is_reachable_after_its_reply(
    nats_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P33: states of 5 MB, whether a rollout ends, fails, is cancelled, or its result travels in parts."""
    caplog.set_level(logging.CRITICAL, logger="envbus.server")  # pytest keeps tracebacks that are logged
    env = StateEnv()
    async with served(env, nats_url, prefix) as (client, server):
        await all_of(client, "keep", 40)
        assert env.most <= 2 * AT_ONCE, "states outlive their rollouts"
        await all_of(client, "fail", 10)
        await asyncio.gather(*(client.run_group([do("keep", size=700_000)] * 2, None, "m") for _ in range(4)))
        hanging = [asyncio.create_task(run(client, do("hang"))) for _ in range(2 * AT_ONCE)]
        await becomes(lambda: sum(1 for _ in env.states) >= AT_ONCE)
        for call in hanging:
            call.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        await confirmed(client, server)
        await becomes(lambda: unreachable(env))  # a cancelled job is off the tables before its task has ended


async def test_large_inputs_that_wait_are_kept_packed_and_once(nats_url: str, prefix: str) -> None:
    """P37: 40 prompts of 5 MB that compress well wait for a server; cancelled, they leave nothing."""
    content = "x" * STATE_BYTES
    item: Any = {"prompt": [{"role": "user", "content": content}], "example_id": 0, "do": "small"}
    async with served(StateEnv(), nats_url, prefix) as (client, server):
        hanging = [asyncio.create_task(run(client, do("hang"))) for _ in range(AT_ONCE)]
        await becomes(lambda: len(pending(client)) == 0 and len(in_flight(client)) == AT_ONCE)
        with traced():
            before, _ = tracemalloc.get_traced_memory()
            waiting = [asyncio.create_task(run(client, item)) for _ in range(40)]
            await becomes(lambda: len(pending(client)) == 40)
            gc.collect()
            used, _ = tracemalloc.get_traced_memory()
        for call in [*hanging, *waiting]:
            call.cancel()
        await asyncio.gather(*hanging, *waiting, return_exceptions=True)
        assert used - before < 4 * STATE_BYTES
        await confirmed(client, server)


async def test_a_long_run_starts_no_more_tasks_than_may_run() -> None:
    """20,000 inputs, 4 at a time: what waits is a number in a line."""
    most = 0

    class Runner:
        async def run_rollout(self, item: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal most
            if item["example_id"] % 500 == 0:
                most = max(most, len(asyncio.all_tasks()))
            return {"example_id": item["example_id"], "reward": 1.0}

        run_group = run_rollout

    inputs: list[RolloutInput] = [{"prompt": [], "example_id": number} for number in range(20_000)]
    result = await generate(Runner(), inputs, None, "m", env_id="e", max_concurrent=4)
    assert len(result["outputs"]) == 20_000
    assert most < 20


async def test_a_saved_run_keeps_each_output_once(tmp_path: Path) -> None:
    """The outputs are the result; writing them down keeps no second copy."""

    class Runner:
        async def run_rollout(self, item: Any, *args: Any, **kwargs: Any) -> Any:
            return {"example_id": item["example_id"], "reward": 1.0, "completion": "x" * RESULT_BYTES + str(item)}

        run_group = run_rollout

    inputs: list[RolloutInput] = [{"prompt": [], "example_id": number} for number in range(MANY)]
    with traced():
        result = await generate(Runner(), inputs, None, "m", env_id="e", max_concurrent=16, results_path=tmp_path)
        used, peak = tracemalloc.get_traced_memory()
    assert used < 1.1 * MANY * RESULT_BYTES
    assert peak < 1.3 * MANY * RESULT_BYTES
    del result
    assert len(load_results(tmp_path)["outputs"]) == MANY
