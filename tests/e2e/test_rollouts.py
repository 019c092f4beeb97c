"""Calls to one server process: what comes back, what runs where, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stage import ENV_ID, READY_S, SERVER_SETTINGS, Stage, do, leftovers, run, settled

from envbus import NATSEnvClient, NATSEnvServer, ServerSettings
from envbus.errors import BadRequestError, UsageError


async def test_a_rollout_runs_in_the_server(shared: Stage) -> None:
    async with shared.client() as client:
        info = await client.wait_for_server(timeout_s=READY_S)
        item = do("return", value=[1, "two", None])
        output = await run(client, item)
        assert output["odd"] == [1, "two", None]
        assert output["example_id"] == item["example_id"]
        assert output["pid"] == shared.servers[0].pid
        assert (info.env, info.env_id, info.max_concurrent, info.num_eval_examples) == ("stage", ENV_ID, 4, 16)
        assert await client.health()
        await settled(client)
    await shared.idle()


async def test_a_group_comes_back_in_input_order_with_one_failed_member(shared: Stage) -> None:
    """P31: eight entries, seven ranked, the failed one in its place."""
    items = [do("slow", t=0.05 * (8 - n)) for n in range(8)]
    items[3] = do("raise", kind="member 3 fails") | {"example_id": items[3]["example_id"]}
    async with shared.client() as client:
        outputs = await client.run_group(items, None, "m")
    assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
    assert outputs[3]["error"] is not None
    assert outputs[3]["reward"] is None
    assert [output["reward"] for output in outputs if output.get("error") is None] == [0, 1, 2, 3, 4, 5, 6]
    await shared.idle()


async def test_a_short_group_is_failed_not_scored(shared: Stage) -> None:
    """P31: an answer with fewer members than inputs fails all of them, with the counts in the error."""
    items = [do(drop=1), do(), do()]
    async with shared.client() as client:
        outputs = await client.run_group(items, None, "m")
        assert [output["example_id"] for output in outputs] == [item["example_id"] for item in items]
        assert all(output["reward"] is None and output["error"] for output in outputs)
        error = outputs[0]["error"]
        assert error is not None
        assert "2 outputs for 3 inputs" in error["error_chain_repr"]
        assert await client.run_group([], None, "m") == []


async def test_single_rollouts_of_a_group_env_are_refused(stage: Stage) -> None:
    """P31: an env that scores in groups never scores a lone rollout."""
    stage.launch(env_args={"groups": True})
    async with stage.client() as client:
        info = await client.wait_for_server(timeout_s=READY_S)
        assert info.requires_group_rollouts
        with pytest.raises(BadRequestError, match="run_group"):
            await run(client, do())
        with pytest.raises(UsageError, match="independent_scoring"):
            await client.evaluate(None, "m", independent_scoring=True)
        outputs = await client.run_group([do(), do()], None, "m")
        assert [output["reward"] for output in outputs] == [0.0, 1.0]


async def test_evaluate_reads_its_examples_over_the_bus(shared: Stage) -> None:
    async with shared.client() as client:
        result = await client.evaluate(None, "m", num_examples=5, rollouts_per_example=2)
    assert [output["example_id"] for output in result["outputs"]] == [n for n in range(5) for _ in range(2)]
    assert result["metadata"]["avg_reward"] == 1.0
    assert result["metadata"]["num_failed"] == 0


async def test_slow_calls_do_not_block_info_check_or_cancel(shared: Stage) -> None:
    """P36: three calls of a minute run side by side; info and health answer in between, a cancel acts at once."""
    async with shared.client() as client:
        items = [do("slow", t=60) for _ in range(3)]
        calls = [asyncio.create_task(run(client, item)) for item in items]
        for item in items:
            await shared.event("start", item["example_id"])
        await client.info()
        assert await client.health()
        calls[2].cancel()
        await shared.event("cancelled", items[2]["example_id"])
        assert not any(call.done() for call in calls[:2])
        for call in calls:
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 3
        await settled(client)
    await shared.idle()


async def test_an_env_that_blocks_its_loop_stops_neither_beats_nor_accepts(shared: Stage, tmp_path: Path) -> None:
    """P36, P08: time.sleep in the env: beats go on and say the lag, a new job is accepted meanwhile."""
    hold = tmp_path / "hold"
    hold.touch()
    async with shared.client() as client, shared.beats() as beats:
        item = do("block", **{"while": str(hold)})
        blocked = asyncio.create_task(run(client, item))
        await shared.event("start", item["example_id"])
        second = asyncio.create_task(run(client, do()))
        before = beats.count
        try:
            both = await beats.until(lambda now: any(beat.in_flight == 2 for beat in now))
            assert both[0].state in ("ready", "full", "lagging")
            await beats.until(lambda now: any(beat.loop_lag_s > 0.3 for beat in now))
            assert beats.count - before >= 3
            assert await client.health()
            assert not blocked.done()
        finally:
            hold.unlink()
        await asyncio.gather(blocked, second)
        assert client._session is not None
        assert client._session.counts["resent"] == 0
    assert len(shared.events("start", example_id=item["example_id"])) == 1


async def test_two_clients_of_a_process_share_one_connection(shared: Stage) -> None:
    async with shared.client() as one, shared.client() as two:
        assert one._bus is two._bus
        await asyncio.gather(run(one, do()), run(two, do()))
        await one.close()
        assert (await run(two, do()))["reward"] == 1.0
        with pytest.raises(UsageError, match="closed"):
            await run(one, do())
        await settled(two)


async def test_a_client_is_used_from_several_event_loops(shared: Stage) -> None:
    """A trainer may call from its own thread's loop; results come back to the loop that asked."""
    async with shared.client() as client:
        here, there = await asyncio.gather(run(client, do()), asyncio.to_thread(lambda: asyncio.run(run(client, do()))))
        assert here["reward"] == there["reward"] == 1.0


async def test_what_a_caller_may_not_pass_is_refused_before_it_is_sent(shared: Stage) -> None:
    async with shared.client() as client:
        with pytest.raises(UsageError, match="ClientConfig"):
            await client.run_rollout(do(), object(), "m")  # type: ignore[arg-type]
        assert not any(leftovers(client).values())


async def test_a_multiprocessing_process_serves_as_a_sidecar(nats_url: str, prefix: str) -> None:
    """The documented sidecar: Process(target=NATSEnvServer.run_server), ended by terminate()."""
    process = multiprocessing.get_context("spawn").Process(
        target=NATSEnvServer.run_server,
        args=("reverse-text", {}, nats_url),
        kwargs={"prefix": prefix, "settings": ServerSettings(**SERVER_SETTINGS)},
    )
    process.start()
    try:
        async with NATSEnvClient(nats_url, "reverse-text", prefix=prefix) as client:
            await client.wait_for_server(timeout_s=30)
            assert len(await client.examples(3)) == 3
        process.terminate()
        await asyncio.to_thread(process.join, 10)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def test_importing_the_client_pulls_in_no_environment_library() -> None:
    """The client needs neither datasets nor openai nor an environment."""
    check = (
        "import sys, envbus, envbus.client; "
        "bad = {'datasets', 'openai', 'verifiers'} & set(sys.modules); "
        "bad |= {m for m in sys.modules if m.startswith('envbus.environments')}; "
        "sys.exit(', '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_envbus_is_fast() -> None:
    """A smoke check, not a benchmark: under 0.3 s over a bare start of the interpreter."""

    def median_s(code: str) -> float:
        times = []
        for _ in range(3):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
            times.append(time.perf_counter() - started)
        return sorted(times)[1]

    assert median_s("import envbus") - median_s("pass") < 0.3
