"""The numbers of a run, from its outputs (pure).

Failed rollouts, and rewards that are not finite numbers, are counted and left
out of every mean: neither is a reward of 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from envbus.types import GenerateMetadata, RolloutOutput, TokenUsage

PASS_THRESHOLD = 0.5
"""A rollout passes when its reward is at least this."""


def finite_number(value: Any) -> float | None:
    """The value as a float, or None when it is not a finite real number."""
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def finite_reward(output: RolloutOutput) -> float | None:
    """The reward that counts towards means: None for failed rollouts and invalid rewards."""
    return None if output.get("error") else finite_number(output.get("reward"))


def mean(values: Sequence[float]) -> float | None:
    """Mean; None of nothing. Does not overflow for finite values."""
    return math.fsum(value / len(values) for value in values) if values else None


def std(values: Sequence[float]) -> float | None:
    """Population standard deviation; None of nothing."""
    centre = mean(values)
    if centre is None:
        return None
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values))


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of values that are sorted and not empty."""
    rank = math.ceil(percent / 100 * len(sorted_values))
    return sorted_values[max(rank, 1) - 1]


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate that at least one of k rollouts is correct, from n rollouts with c correct (k ≤ n)."""
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def mean_pass_at_k(
    outputs: Sequence[RolloutOutput | None], *, rollouts_per_example: int, threshold: float = PASS_THRESHOLD
) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, … up to rollouts_per_example, averaged over examples.

    An example counts with the rollouts that have a finite reward, and for the k that they suffice for.

    Args:
        outputs: In input order, so that each example's rollouts are next to each other; None where missing.
        rollouts_per_example: Size of those runs of outputs.
        threshold: Reward from which a rollout is correct.
    """
    counts: list[tuple[int, int]] = []
    for start in range(0, len(outputs), rollouts_per_example):
        group = outputs[start : start + rollouts_per_example]
        rewards = [r for output in group if output is not None and (r := finite_reward(output)) is not None]
        counts.append((len(rewards), sum(reward >= threshold for reward in rewards)))
    estimates: dict[str, float] = {}
    for k in (2**power for power in range(rollouts_per_example.bit_length())):
        estimate = mean([pass_at_k(n, c, k) for n, c in counts if n >= k])
        if estimate is not None:
            estimates[str(k)] = estimate
    return estimates


def mean_metrics(outputs: Iterable[RolloutOutput]) -> dict[str, float]:
    """Mean of each metric over the rollouts without error that have a finite value of it."""
    values: dict[str, list[float]] = {}
    for output in outputs:
        if output.get("error"):
            continue
        for name, value in (output.get("metrics") or {}).items():
            if (number := finite_number(value)) is not None:
                values.setdefault(name, []).append(number)
    return {name: math.fsum(v / len(numbers) for v in numbers) for name, numbers in values.items()}


def rollout_time_percentiles(outputs: Iterable[RolloutOutput]) -> dict[str, float]:
    """p50, p90, p99 and max of the rollouts' total seconds; empty when none has a time."""
    timings: Iterable[Any] = (output.get("timing") or {} for output in outputs)
    totals = (finite_number(timing.get("total_s")) for timing in timings)
    times = sorted(total for total in totals if total is not None)
    if not times:
        return {}
    return {f"p{percent}": percentile(times, percent) for percent in (50, 90, 99)} | {"max": times[-1]}


def summarize(
    outputs: Sequence[RolloutOutput | None], *, rollouts_per_example: int, threshold: float = PASS_THRESHOLD
) -> GenerateMetadata:
    """The part of a run's metadata that is computed from its outputs.

    Args:
        outputs: In input order; None where a rollout has not ended.
        rollouts_per_example: How many neighbouring outputs belong to one example.
        threshold: Reward from which a rollout passes.
    """
    ended = [output for output in outputs if output is not None]
    stats = RunningStats()
    for output in ended:
        stats.update(output)
    rewards = [reward for output in ended if (reward := finite_reward(output)) is not None]
    return {
        "num_rollouts": stats.done,
        "num_failed": stats.failed,
        "errors_by_type": dict(stats.errors_by_type.most_common()),
        "num_invalid_rewards": stats.done - stats.failed - len(rewards),
        "avg_reward": mean(rewards),
        "std_reward": std(rewards),
        "avg_metrics": mean_metrics(ended),
        "pass_at_k": mean_pass_at_k(outputs, rollouts_per_example=rollouts_per_example, threshold=threshold),
        "pass_threshold": threshold,
        "token_usage": stats.token_usage,
        "rollout_time_s": rollout_time_percentiles(ended),
    }


@dataclass(slots=True)
class RunningStats:
    """Counts of a run so far, for live displays; one cheap update per output."""

    done: int = 0
    """Ended rollouts, failed ones included."""
    failed: int = 0
    num_rewards: int = 0
    """Rollouts with a finite reward."""
    reward_sum: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    errors_by_type: Counter[str] = field(default_factory=Counter)

    def update(self, output: RolloutOutput) -> None:
        """Count one more output."""
        self.done += 1
        if error := output.get("error"):
            self.failed += 1
            self.errors_by_type[error["error"]] += 1
        if (reward := finite_reward(output)) is not None:
            self.num_rewards += 1
            self.reward_sum += reward
        usage: Any = output.get("token_usage") or {}
        self.input_tokens += int(finite_number(usage.get("input_tokens")) or 0)
        self.output_tokens += int(finite_number(usage.get("output_tokens")) or 0)

    @property
    def mean_reward(self) -> float | None:
        """Mean over finite rewards; None while there is none."""
        return self.reward_sum / self.num_rewards if self.num_rewards else None

    @property
    def token_usage(self) -> TokenUsage:
        """Tokens of all rollouts so far."""
        return {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
