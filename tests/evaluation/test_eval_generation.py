"""generate: order, limits, failures, timeouts, cancelling, callbacks."""

import asyncio
import subprocess
import sys
from collections import Counter

import pytest
from eval_runners import ScriptedRunner, example, examples, output_for

from envbus.errors import ServerLostError, UsageError
from envbus.evaluation import EvalCallbacks, generate, load_results, repeat_examples
from envbus.types import ClientConfig, EndpointConfig


def run(runner, inputs, client=None, **options):
    return generate(runner, inputs, client, "some-model", env_id="some-env", **options)


async def never(row):
    await asyncio.Event().wait()


async def test_outputs_are_in_input_order_whatever_finishes_first():
    """P61: ids that repeat, are strings, or are missing; later rollouts finish before earlier ones."""
    rows = [example("a-1", "zero"), example(7, "one"), example(7, "two"), example(0, "three")]
    del rows[3]["example_id"]
    inputs = repeat_examples(rows, 3)
    gates = [asyncio.Event() for _ in inputs]
    places = iter(range(len(inputs)))

    async def in_reverse(row):
        place = next(places)
        if place == len(inputs) - 1:
            gates[place].set()
        await gates[place].wait()
        if place:
            gates[place - 1].set()
        return output_for(row, 1.0 if row["prompt"][0]["content"] == "one" else 0.0, place=place)

    results = await run(ScriptedRunner(in_reverse), inputs, rollouts_per_example=3)
    assert [output["place"] for output in results["outputs"]] == list(range(12))
    assert [output["prompt"] for output in results["outputs"]] == [row["prompt"] for row in inputs]
    assert results["metadata"]["pass_at_k"] == {"1": 0.25, "2": 0.25}


async def test_three_failures_of_twenty_are_rows_and_the_rest_is_kept(tmp_path):
    """P02, P16."""
    errors = {7: RuntimeError("a plain error"), 9: ServerLostError("attempts used up"), 11: "not an output"}

    def script(row):
        error = errors.get(row["example_id"])
        if isinstance(error, Exception):
            raise error
        return error or output_for(row, 0.5)

    results = await run(ScriptedRunner(script), examples(20), results_path=tmp_path)
    metadata = results["metadata"]
    assert metadata["num_failed"] == 3
    assert metadata["errors_by_type"] == {"RuntimeError": 1, "ServerLostError": 1, "RolloutError": 1}
    assert metadata["avg_reward"] == 0.5
    broken = results["outputs"][7]
    assert broken["reward"] is None
    assert broken["metrics"] == {}
    assert "a plain error" in broken["error"]["error_chain_repr"]
    assert (broken["example_id"], broken["answer"], broken["info"]) == (7, "7", {"n": 7})
    assert broken["prompt"] == examples(20)[7]["prompt"]
    assert load_results(tmp_path)["outputs"] == results["outputs"]


@pytest.mark.parametrize("group_scoring", [False, True])
async def test_the_limit_counts_rollouts(group_scoring):
    """P31, P52: single rollouts and groups of 4 under a limit of 10."""
    runner = ScriptedRunner()
    inputs = repeat_examples(examples(8), 4)
    results = await run(runner, inputs, rollouts_per_example=4, group_scoring=group_scoring, max_concurrent=10)
    assert len(results["outputs"]) == 32
    assert runner.peak == (8 if group_scoring else 10)


async def test_a_group_over_the_limit_is_refused_before_anything_runs(tmp_path):
    """P31."""
    runner = ScriptedRunner()
    inputs = repeat_examples(examples(4), 8)
    with pytest.raises(UsageError, match="max_concurrent=7"):
        await run(
            runner, inputs, rollouts_per_example=8, group_scoring=True, max_concurrent=7, results_path=tmp_path / "run"
        )
    assert runner.seen == []
    assert not (tmp_path / "run").exists()


async def test_one_failing_member_does_not_lose_the_group():
    """P31: eight entries come back in input order, seven of them scored."""
    places = iter(range(8))

    def script(row):
        place = next(places)
        error = {"error": "ToolError", "error_chain_repr": "ToolError()", "error_chain_str": "ToolError"}
        return output_for(row, None, error=error) if place == 3 else output_for(row, float(place))

    results = await run(
        ScriptedRunner(script), repeat_examples(examples(1), 8), rollouts_per_example=8, group_scoring=True
    )
    assert [output["reward"] for output in results["outputs"]] == [0.0, 1.0, 2.0, None, 4.0, 5.0, 6.0, 7.0]
    assert results["metadata"]["num_failed"] == 1


@pytest.mark.parametrize(
    "answer", [[], [{"reward": 1.0}], [{"reward": 1.0}] * 3, None, "ab", [{}, "x"], {"a": 1, "b": 2}]
)
async def test_a_wrong_group_answer_fails_the_whole_group(answer):
    """P31: never fewer outputs than inputs without notice."""

    class WrongRunner(ScriptedRunner):
        async def run_group(self, group_inputs, *settings, **options):
            if group_inputs[0]["example_id"] == 1:
                return answer
            return await super().run_group(group_inputs, *settings, **options)

    results = await run(WrongRunner(), repeat_examples(examples(3), 2), rollouts_per_example=2, group_scoring=True)
    assert [bool(output["error"]) for output in results["outputs"]] == [False, False, True, True, False, False]
    assert results["metadata"]["errors_by_type"] == {"RolloutError": 2}


async def test_a_timeout_ends_only_that_rollout():
    """P22: a failed sample of its own kind, not an aborted run."""

    def script(row):
        return never(row) if row["example_id"] == 1 else output_for(row)

    runner = ScriptedRunner(script)
    results = await run(runner, examples(3), rollout_timeout_s=0.05, max_concurrent=1)
    assert [bool(output["error"]) for output in results["outputs"]] == [False, True, False]
    assert results["outputs"][1]["error"]["error"] == "RolloutTimeoutError"
    assert results["outputs"][1]["timing"]["total_s"] >= 0.05
    assert runner.cancelled == 1
    assert runner.running == 0


async def test_a_timeout_error_of_the_runner_keeps_its_own_type():
    def script(row):
        raise TimeoutError("a socket")

    results = await run(ScriptedRunner(script), examples(1), rollout_timeout_s=60)
    assert results["outputs"][0]["error"]["error"] == "TimeoutError"


async def test_a_runner_that_cancels_its_own_call_gives_a_failed_row():
    def script(row):
        raise asyncio.CancelledError

    results = await run(ScriptedRunner(script), examples(2))
    assert [output["error"]["error"] for output in results["outputs"]] == ["CallCancelledError"] * 2


async def test_cancelling_ends_every_rollout_and_keeps_what_was_done(tmp_path):
    started = asyncio.Event()

    def script(row):
        if row["example_id"] == 5:
            started.set()
        return output_for(row) if row["example_id"] < 2 else never(row)

    runner = ScriptedRunner(script)
    task = asyncio.create_task(run(runner, examples(6), results_path=tmp_path))
    await asyncio.wait_for(started.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (runner.running, runner.cancelled) == (0, 4)
    saved = load_results(tmp_path)
    assert len(saved["outputs"]) == saved["metadata"]["num_rollouts"] == 2


def test_an_interrupt_ends_every_rollout():
    def interrupt(row):
        if row["example_id"] == 3:
            raise KeyboardInterrupt
        return never(row)

    runner = ScriptedRunner(interrupt)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run(runner, examples(4)))
    assert (runner.running, runner.cancelled) == (0, 3)


async def test_callbacks_hear_everything_and_a_raising_one_changes_nothing(caplog):
    class Loud(EvalCallbacks):
        def __init__(self):
            self.heard = Counter()

        def on_start(self, total, resumed):
            self.heard["start", total, len(resumed)] += 1
            raise RuntimeError("a broken display")

        def on_output(self, output):
            self.heard["output", output["example_id"]] += 1
            raise RuntimeError("a broken display")

        def on_end(self, metadata):
            self.heard["end", metadata["num_rollouts"]] += 1
            raise RuntimeError("a broken display")

    callbacks = Loud()
    results = await run(ScriptedRunner(), examples(2), callbacks=callbacks)
    assert len(results["outputs"]) == 2
    assert callbacks.heard == {("start", 2, 0): 1, ("output", 0): 1, ("output", 1): 1, ("end", 2): 1}
    assert caplog.text.count("a broken display") >= 4


async def test_several_endpoints_are_used_round_robin_one_per_example():
    """The others stay with it, for when that one is down."""
    urls = ["http://one/v1", "http://two/v1"]
    client = ClientConfig(endpoint_configs=tuple(EndpointConfig(api_base_url=url, timeout=7) for url in urls))
    runner = ScriptedRunner()
    results = await run(runner, repeat_examples(examples(3), 2), client, rollouts_per_example=2)
    firsts = [[each.api_base_url for each in config.endpoint_configs] for config in runner.clients]
    assert firsts == [[urls[i], urls[1 - i]] for i in (0, 0, 1, 1, 0, 0)]
    assert all(config.keep_order and config.endpoint_configs[0].timeout == 7 for config in runner.clients)
    assert results["metadata"]["base_url"] == "http://one/v1,http://two/v1"


async def test_a_rollout_that_changes_its_input_does_not_change_the_others():
    def script(row):
        assert "mark" not in row
        row["mark"] = True
        return output_for(row)

    results = await run(ScriptedRunner(script), repeat_examples(examples(2), 2), rollouts_per_example=2)
    assert results["metadata"]["num_failed"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollouts_per_example": 0}, "at least 1"),
        ({"rollouts_per_example": 2}, "not a multiple"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"state_columns": "turn"}, "list of names"),
        ({"state_columns": ["index"]}, "taken"),
    ],
)
async def test_senseless_arguments_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        await run(ScriptedRunner(), examples(3), **options)


async def test_no_inputs_is_an_empty_run():
    results = await run(ScriptedRunner(), [])
    assert results["outputs"] == []
    assert results["metadata"]["num_rollouts"] == 0


def test_importing_the_evaluation_is_light():
    code = (
        "import sys, envbus.evaluation, envbus.logs;"
        "print(sorted({'openai', 'datasets', 'nats', 'rich', 'envbus.environments'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
