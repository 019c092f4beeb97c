"""Resuming: only missing and failed rollouts run again, and only of the same run."""

import json
import math

import pytest
from eval_runners import ScriptedRunner, examples, output_for
from hypothesis import given
from hypothesis import strategies as st

from envbus.errors import UsageError
from envbus.evaluation import (
    EvalCallbacks,
    default_results_path,
    find_latest_run,
    generate,
    load_results,
    repeat_examples,
)


def run(runner, inputs, folder, **options):
    settings = {"env_id": "some-env", "model": "some-model"} | options
    return generate(runner, inputs, None, results_path=folder, **settings)


def fail(row):
    raise RuntimeError("broken")


class Journal(EvalCallbacks):
    def __init__(self):
        self.start = None
        self.logs = []

    def on_start(self, total, resumed):
        self.start = (total, len(resumed))

    def on_log(self, message):
        self.logs.append(message)


async def test_only_failed_and_missing_rollouts_run_again(tmp_path):
    """P16: also with a last line that was cut off."""
    await run(
        ScriptedRunner(lambda row: fail(row) if row["example_id"] in (2, 4) else output_for(row)), examples(6), tmp_path
    )
    file = tmp_path / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    lost = json.loads(lines[-1])["index"]

    runner, journal = ScriptedRunner(lambda row: output_for(row, 0.25)), Journal()
    results = await run(runner, examples(6), tmp_path, callbacks=journal)
    again = sorted({2, 4, lost})
    assert [row["example_id"] for row in runner.seen] == again
    assert journal.start == (6, 6 - len(again))
    assert "resuming" in journal.logs[0]
    assert [output["reward"] for output in results["outputs"]] == [0.25 if i in again else 1.0 for i in range(6)]
    assert results["metadata"]["num_failed"] == 0
    assert load_results(tmp_path) == results


async def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    first = await run(ScriptedRunner(), examples(3), tmp_path)
    runner = ScriptedRunner()
    second = await run(runner, examples(3), tmp_path)
    assert runner.seen == []
    assert second["outputs"] == first["outputs"]


@given(size=st.integers(1, 3), outcomes=st.lists(st.booleans(), min_size=6, max_size=6), group_scoring=st.booleans())
async def test_what_runs_again(size, outcomes, group_scoring, tmp_path_factory):
    """A group is scored together, so with group scoring all of it runs again."""
    folder = tmp_path_factory.mktemp("run")
    inputs = repeat_examples(examples(6 // size), size)
    places = iter(outcomes)

    def script(row):
        good = next(places)
        error = {"error": "X", "error_chain_repr": "X()", "error_chain_str": "X"}
        return output_for(row) if good else output_for(row, None, error=error)

    options = {"rollouts_per_example": size, "group_scoring": group_scoring, "max_concurrent": size}
    await run(ScriptedRunner(script), inputs, folder, **options)
    runner = ScriptedRunner()
    results = await run(runner, inputs, folder, **options)
    failed = [i for i, good in enumerate(outcomes) if not good]
    again = {i - i % size + m for i in failed for m in range(size)} if group_scoring else set(failed)
    assert [row["example_id"] for row in runner.seen] == [i // size for i in sorted(again)]
    assert results["metadata"]["num_failed"] == 0
    assert len(results["outputs"]) == 6


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("env_id", {"env_id": "other"}),
        ("env_args", {"env_args": {"split": "hard"}}),
        ("model", {"model": "other"}),
        ("rollouts_per_example", {"rollouts_per_example": 1}),
        ("num_examples", {"inputs": repeat_examples(examples(3), 2)}),
        ("sampling_args", {"sampling_args": {"temperature": 1.0}}),
        ("other examples", {"inputs": repeat_examples(examples(5)[1:], 2)}),
    ],
)
async def test_another_run_is_not_mixed_in(field, options, tmp_path):
    same = {"inputs": repeat_examples(examples(4), 2), "rollouts_per_example": 2, "sampling_args": {"temperature": 0.0}}
    await run(ScriptedRunner(), folder=tmp_path, **same)
    runner = ScriptedRunner()
    with pytest.raises(UsageError, match=field):
        await run(runner, folder=tmp_path, **(same | options))
    assert runner.seen == []


async def test_results_without_readable_metadata_are_not_resumed(tmp_path):
    await run(ScriptedRunner(), examples(1), tmp_path)
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(UsageError, match=r"metadata\.json"):
        await run(ScriptedRunner(), examples(1), tmp_path)


async def test_non_finite_rewards_survive_saving_and_resuming(tmp_path):
    """P29: excluded from the means and counted; the file is strict JSON."""
    rewards = [1.0, math.nan, math.inf, -math.inf]
    await run(ScriptedRunner(lambda row: output_for(row, rewards[row["example_id"]])), examples(4), tmp_path)

    def refuse(constant):
        raise AssertionError(constant)

    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    runner = ScriptedRunner()
    results = await run(runner, examples(4), tmp_path)
    assert runner.seen == []
    assert [str(output["reward"]) for output in results["outputs"]] == ["1.0", "nan", "inf", "-inf"]
    assert results["metadata"]["avg_reward"] == 1.0
    assert results["metadata"]["num_invalid_rewards"] == 3


async def test_a_full_disk_does_not_stop_the_run(tmp_path):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    journal = Journal()
    results = await run(ScriptedRunner(), examples(5), tmp_path, callbacks=journal)
    assert results["metadata"]["avg_reward"] == 1.0
    assert results["metadata"]["save_error"].startswith("5 rows could not be saved")
    assert journal.logs == [results["metadata"]["save_error"]]
    saved = json.loads((tmp_path / "metadata.json").read_text())
    assert saved["save_error"] == results["metadata"]["save_error"]


async def test_saving_without_a_path_makes_a_run_that_is_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = await generate(ScriptedRunner(), examples(2), None, "org/model", env_id="org/env", save_results=True)
    folder = find_latest_run("org/env", "org/model")
    assert str(folder) == results["metadata"]["path_to_save"]
    assert folder.parent == default_results_path("org/env", "org/model").parent
    assert load_results(folder) == results
