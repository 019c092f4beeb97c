"""The numbers of a run."""

import itertools
import math
import statistics

import pytest
from eval_runners import example, output_for
from hypothesis import given
from hypothesis import strategies as st

from envbus.error_chain import error_info
from envbus.errors import InfraError, ModelError
from envbus.evaluation import RunningStats, summarize
from envbus.evaluation.summary import mean, pass_at_k, percentile, std

FINITE = st.floats(-1e6, 1e6)


def rewarded(*rewards):
    return [output_for(example(0), reward) for reward in rewards]


def failed(error):
    return output_for(example(0), None, error=error_info(error), metrics={"length": 100.0})


def test_failures_are_counted_by_type_and_left_out_of_means():
    """P02: a failed rollout is not a reward of 0."""
    outputs = [*rewarded(1.0, 0.0), failed(ModelError("x")), failed(ModelError("y")), failed(InfraError("z"))]
    numbers = summarize(outputs, rollouts_per_example=5)
    assert numbers["num_rollouts"] == 5
    assert numbers["num_failed"] == 3
    assert numbers["errors_by_type"] == {"ModelError": 2, "InfraError": 1}
    assert numbers["avg_reward"] == 0.5
    assert numbers["std_reward"] == 0.5
    assert numbers["avg_metrics"] == {"length": 2.0}
    assert numbers["pass_at_k"] == {"1": 0.5, "2": 1.0}


@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf, None, "1", 10**400])
def test_invalid_rewards_are_counted_and_left_out(invalid):
    """P29."""
    numbers = summarize(rewarded(1.0, invalid, 0.0, True), rollouts_per_example=4)
    assert numbers["num_invalid_rewards"] == 1
    assert numbers["avg_reward"] == pytest.approx(2 / 3)
    assert numbers["num_failed"] == 0


def test_a_failed_rollout_with_a_reward_does_not_count():
    broken = failed(ModelError("x")) | {"reward": 1.0}
    assert summarize([broken], rollouts_per_example=1)["avg_reward"] is None


def test_an_empty_run_has_no_means():
    numbers = summarize([None, None], rollouts_per_example=1)
    assert numbers["num_rollouts"] == 0
    assert numbers["avg_reward"] is None
    assert numbers["std_reward"] is None
    assert numbers["pass_at_k"] == {}
    assert numbers["rollout_time_s"] == {}


def test_groups_go_by_position_not_by_id():
    """P61: all ids are equal, yet each pair is an example of its own."""
    numbers = summarize(rewarded(1.0, 1.0, 0.0, 0.0), rollouts_per_example=2)
    assert numbers["pass_at_k"] == {"1": 0.5, "2": 0.5}


def test_tokens_and_times():
    outputs = [output_for(example(0), 1.0, timing={"total_s": float(i)}) for i in range(1, 11)]
    numbers = summarize(outputs, rollouts_per_example=1)
    assert numbers["token_usage"] == {"input_tokens": 100, "output_tokens": 50}
    assert numbers["rollout_time_s"] == {"p50": 5.0, "p90": 9.0, "p99": 10.0, "max": 10.0}


@given(num_rollouts=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_one(num_rollouts, data):
    num_correct = data.draw(st.integers(0, num_rollouts))
    k = data.draw(st.integers(1, num_rollouts))
    rollouts = [True] * num_correct + [False] * (num_rollouts - num_correct)
    subsets = list(itertools.combinations(rollouts, k))
    assert pass_at_k(num_rollouts, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.lists(FINITE, min_size=1))
def test_mean_and_std_agree_with_the_standard_library(values):
    assert mean(values) == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert std(values) == pytest.approx(statistics.pstdev(values), rel=1e-6, abs=1e-4)


def test_means_do_not_overflow():
    assert mean([1.7e308, 1.7e308]) == pytest.approx(1.7e308)


@given(st.lists(FINITE, min_size=1), st.floats(0.1, 100))
def test_a_percentile_has_that_share_at_or_below_it(values, percent):
    values = sorted(values)
    found = percentile(values, percent)
    assert sum(value <= found for value in values) / len(values) >= percent / 100 - 1e-9
    assert found in values


@given(st.lists(FINITE | st.just(math.nan) | st.none()))
def test_running_stats_agree_with_the_summary(rewards):
    outputs = [*rewarded(*rewards), failed(ModelError("x"))]
    stats = RunningStats()
    for output in outputs:
        stats.update(output)
    numbers = summarize(outputs, rollouts_per_example=1)
    assert (stats.done, stats.failed) == (numbers["num_rollouts"], numbers["num_failed"])
    assert stats.mean_reward == (
        None if numbers["avg_reward"] is None else pytest.approx(numbers["avg_reward"], abs=1e-6)
    )
    assert stats.token_usage == numbers["token_usage"]
