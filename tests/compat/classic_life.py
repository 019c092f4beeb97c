"""Servers of classic environments: signals, teardown, failures, keys, settings; what the library leaves running."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from fleet import READY_S, Fleet, endpoint

from envbus.demo_model import DemoModel
from envbus.errors import BadRequestError

ENV = "probe-classic"
TURNS = {"kind": "turns"}


def row(example_id: int = 0, do: str = "run", **info: Any) -> Any:
    prompt = [{"role": "user", "content": "Add 1 and 2."}]
    return {"example_id": example_id, "prompt": prompt, "answer": "3", "info": {"do": do, **info}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_server_and_tears_down_once(
    fleet: Fleet, demo: DemoModel, number: signal.Signals
) -> None:
    """The library's own handlers would tear down at once and leave with 143."""
    server = fleet.serve(ENV, TURNS)
    async with fleet.client(ENV, TURNS) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(client.run_rollout(row(turns=3, pause_s=0.5), endpoint(demo.base_url), "m"))
        await fleet.event("turn")
        server.signal(number)
        output = await call
        assert output["error"] is None
        assert output["stop_condition"] == "enough"
        assert await server.exit_code() == 0
    assert [line.split()[0] for line in fleet.events()] == ["turn", "turn", "cleanup", "teardown"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_a_load(fleet: Fleet, number: signal.Signals) -> None:
    """By then the library has put its handlers in the place of the server's."""
    server = fleet.serve(ENV, {"kind": "slow_load"})
    await fleet.event("constructed")
    server.signal(number)
    assert await server.exit_code() == 0
    assert "stopped while the environment was loading" in server.log


async def test_a_mixture_is_scored_in_groups_and_torn_down_whole(fleet: Fleet, demo: DemoModel) -> None:
    """The library says that single rollouts are fine, and then asserts; its servers tear down the outermost only."""
    server = fleet.serve(ENV, {"kind": "mixture"})
    async with fleet.client(ENV, {"kind": "mixture"}) as client:
        assert (await client.wait_for_server(timeout_s=READY_S)).requires_group_rollouts
        (example, *_) = await client.examples(1)
        with pytest.raises(BadRequestError, match="scores its rollouts in groups"):
            await client.run_rollout(example, endpoint(demo.base_url), "m")
        server.signal(signal.SIGTERM)
        assert await server.exit_code() == 0
    assert fleet.events() == ["teardown inner"]


async def test_a_group_with_a_member_that_raises(fleet: Fleet, demo: DemoModel) -> None:
    """Its siblings have ended, cleanup included, when the call ends; the error keeps its type and its causes."""
    fleet.serve(ENV, TURNS)
    members = [row(0, "raise"), row(1, turns=500), row(2, turns=500)]
    async with fleet.client(ENV, TURNS) as client:
        await client.wait_for_server(timeout_s=READY_S)
        outputs = await client.run_group(members, endpoint(demo.base_url), "m")
        ended = fleet.events("cleanup")
        turns = len(fleet.events("turn"))
        assert sorted(ended)[-2:] == ["cleanup 1", "cleanup 2"]
        assert turns < 900
        for output in outputs:
            assert output["error"]["error_chain_str"] == "RuntimeError -> KeyError"
            assert output["error"]["error_chain_repr"] == "RuntimeError('broken') -> KeyError('cause')"
            assert output["reward"] is None
        asked = demo.requests
        await client.run_rollout(row(turns=1), endpoint(demo.base_url), "m")
        assert demo.requests == asked + 1


async def test_failures_settings_and_keys(fleet: Fleet, demo: DemoModel) -> None:
    fleet.serve(ENV, TURNS, "-x", '{"label": "four"}', OPENAI_API_KEY="secret", PRIME_API_KEY="secret")
    here = endpoint(demo.base_url)
    async with fleet.client(ENV, TURNS) as client:
        await client.wait_for_server(timeout_s=READY_S)
        output = await client.run_rollout(row(), here, "m")
        assert output["metrics"]["label"] == 4
        assert output["metrics"]["misbehaves"] == 0
        assert output["reward"] == output["metrics"]["length"] > 0

        failed = await client.run_rollout(row(do="library error"), here, "m", max_retries=0)
        assert failed["error"]["error_chain_str"] == "InfraError -> OSError"
        broken = await client.run_rollout(row(do="nothing", turns="x"), here, "m")
        assert broken["error"]["error"] == "TypeError"
        unplain = await client.run_rollout(row(), here, "m", state_columns=["client"])
        assert unplain["error"]["error"] == "ValueError"

        asked = demo.requests
        for variable in ("OPENAI_API_KEY", "PRIME_API_KEY"):
            refused = await client.run_rollout(row(), endpoint(demo.base_url, api_key_var=variable), "m")
            assert "ModelKeyError" in refused["error"]["error_chain_str"]
        nobody = await client.run_rollout(row(), None, "m")
        assert "pass a client" in nobody["error"]["error_chain_repr"]
        assert demo.requests == asked


async def test_a_reward_that_blocks_delays_no_answer_on_the_bus(fleet: Fleet, demo: DemoModel) -> None:
    fleet.serve(ENV, TURNS)
    async with fleet.client(ENV, TURNS) as client:
        await client.wait_for_server(timeout_s=READY_S)
        call = asyncio.create_task(client.run_rollout(row(do="block"), endpoint(demo.base_url), "m"))
        await fleet.event("blocking")
        await client.info()
        assert (await client.servers())[0].in_flight == 1
        assert fleet.events("unblocked") == []
        assert (await call)["error"] is None
