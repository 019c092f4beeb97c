"""The summary of a run, as text or as one JSON object. Its numbers come from the run's metadata and outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from envbus.cli.formats import duration, number, plural, shortened
from envbus.evaluation.strict_json import dumps
from envbus.evaluation.summary import finite_number, percentile
from envbus.types import GenerateMetadata, RolloutOutput

MAX_EXAMPLES_SHOWN = 50
_MAX_ERROR_CHARS = 300
_MAX_MESSAGE_CHARS = 2000


def print_summary(
    console: Console, metadata: GenerateMetadata, outputs: Sequence[RolloutOutput], *, planned: int, abbreviated: bool
) -> None:
    """Print a run's summary.

    Args:
        console: Where to.
        metadata: Of the run, finished or not.
        outputs: In input order if the run is finished.
        planned: Rollouts that the run should have had.
        abbreviated: Leave the example out.
    """
    if not abbreviated:
        _print_example(console, outputs)
    console.print(Rule(Text(f"{metadata['env_id']} · {metadata['model']}"), align="left"))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(metadata, outputs, planned):
        facts.add_row(Text(name, style="dim"), Text(value))
    console.print(facts)
    for line in reward_rows(metadata, outputs):
        console.print(Text(line), soft_wrap=True)
    if metadata["num_failed"]:
        _print_failures(console, metadata, outputs)
    if metadata.get("save_error"):
        console.print(Text(f"not saved: {metadata['save_error']}", style="red"), soft_wrap=True)
    if metadata.get("path_to_save"):
        console.print(Text(f"results: {metadata['path_to_save']}"), soft_wrap=True)
        if metadata["num_failed"] or len(outputs) < planned:
            console.print(Text("to run what is missing or failed: the same command with -R"), soft_wrap=True)


def summary_json(metadata: GenerateMetadata, outputs: Sequence[RolloutOutput], *, planned: int) -> str:
    """The summary as one JSON object."""
    examples = [
        {"example_id": example_id, "rewards": [_reward(output) for output in group]}
        for example_id, group in _by_example(metadata, outputs)
    ]
    errors = [
        {"type": kind, "count": count, "example": message} for kind, count, message in _failures(metadata, outputs)
    ]
    summary: dict[str, Any] = {**metadata, "planned_rollouts": planned, "rewards": examples, "errors": errors}
    return json.dumps(json.loads(dumps(summary)), indent=2)


def reward_rows(metadata: GenerateMetadata, outputs: Sequence[RolloutOutput]) -> Iterator[str]:
    """One line per example: ``ex 0: 0.83 1.00 failed``."""
    groups = _by_example(metadata, outputs)
    for example_id, group in groups[:MAX_EXAMPLES_SHOWN]:
        yield f"ex {example_id}: " + " ".join(_reward_text(output) for output in group)
    if len(groups) > MAX_EXAMPLES_SHOWN:
        yield f"… and {plural(len(groups) - MAX_EXAMPLES_SHOWN, 'example')} more"


def _facts(metadata: GenerateMetadata, outputs: Sequence[RolloutOutput], planned: int) -> Iterator[tuple[str, str]]:
    rewarded = metadata["num_rollouts"] - metadata["num_failed"] - metadata["num_invalid_rewards"]
    yield "endpoint", metadata["base_url"] or "-"
    yield (
        "run",
        (
            f"{plural(metadata['num_examples'], 'example')} x {plural(metadata['rollouts_per_example'], 'rollout')}"
            + (", scored in groups" if metadata["group_scoring"] else "")
        ),
    )
    if metadata["env_args"]:
        yield "env args", dumps(metadata["env_args"])
    if metadata["sampling_args"]:
        yield "sampling", dumps(metadata["sampling_args"])
    if metadata["num_rollouts"] < planned:
        yield "interrupted", f"{metadata['num_rollouts']} of {planned} rollouts were run"
    spread = f" ± {number(metadata['std_reward'])}" if rewarded else ""
    yield "reward", f"{number(metadata['avg_reward'])}{spread} over {plural(rewarded, 'rollout')}"
    if metadata["pass_at_k"]:
        passes = "  ".join(f"@{k} {number(value)}" for k, value in metadata["pass_at_k"].items())
        yield "pass", f"{passes}  (reward ≥ {metadata['pass_threshold']:g})"
    for name, value in metadata["avg_metrics"].items():
        yield name, number(value)
    yield "failed", f"{metadata['num_failed']} of {metadata['num_rollouts']} failed"
    if metadata["num_invalid_rewards"]:
        yield "invalid", f"{plural(metadata['num_invalid_rewards'], 'reward')} not finite, left out"
    usage = metadata["token_usage"]
    yield "tokens", f"{usage['input_tokens']:,} in, {usage['output_tokens']:,} out"
    times = rollout_time(outputs)
    yield "time", duration(metadata["time_s"]) + (f"; a rollout: {times}" if times else "")


def rollout_time(outputs: Sequence[RolloutOutput]) -> str:
    """Median and 95th percentile of the rollouts' times; empty when none has one."""
    timings: Any = [output.get("timing") or {} for output in outputs]
    times = sorted(total for timing in timings if (total := finite_number(timing.get("total_s"))) is not None)
    if not times:
        return ""
    return f"median {duration(percentile(times, 50))}, p95 {duration(percentile(times, 95))}"


def _by_example(metadata: GenerateMetadata, outputs: Sequence[RolloutOutput]) -> list[tuple[Any, list[RolloutOutput]]]:
    """Each example's outputs: by position where all are there, else by id."""
    size = metadata["rollouts_per_example"]
    if len(outputs) == metadata["num_examples"] * size:
        slices = [list(outputs[start : start + size]) for start in range(0, len(outputs), size)]
        return [(group[0].get("example_id", "?"), group) for group in slices]
    groups: dict[Any, list[RolloutOutput]] = {}
    for output in outputs:
        groups.setdefault(output.get("example_id", "?"), []).append(output)
    return sorted(groups.items(), key=lambda item: (isinstance(item[0], str), item[0]))


def _reward(output: RolloutOutput) -> float | None:
    return None if output.get("error") else finite_number(output.get("reward"))


def _reward_text(output: RolloutOutput) -> str:
    if output.get("error"):
        return "failed"
    reward = _reward(output)
    return "invalid" if reward is None else f"{reward:.2f}"


def _failures(metadata: GenerateMetadata, outputs: Sequence[RolloutOutput]) -> Iterator[tuple[str, int, str]]:
    for kind, count in metadata["errors_by_type"].items():
        message = next(
            (
                str(error.get("error_chain_repr", kind))
                for output in outputs
                if (error := output.get("error")) and error["error"] == kind
            ),
            "",
        )
        yield kind, count, shortened(message, _MAX_ERROR_CHARS)


def _print_failures(console: Console, metadata: GenerateMetadata, outputs: Sequence[RolloutOutput]) -> None:
    table = Table("error", "count", "for example", title=None)
    for kind, count, message in _failures(metadata, outputs):
        table.add_row(Text(kind), str(count), Text(message))
    console.print(table)


def _print_example(console: Console, outputs: Sequence[RolloutOutput]) -> None:
    output = next((each for each in outputs if not each.get("error")), None)
    if output is None:
        return
    console.print(Rule(Text(f"example {output.get('example_id')}"), align="left"))
    messages = [*(output.get("prompt") or []), *(output.get("completion") or [])]
    for message in islice(messages, 40):
        console.print(Text(f"{message.get('role', '?')}: ", style="bold"), Text(_content(message)), sep="")
    console.print(Text(f"reward: {_reward_text(output)}", style="bold"))


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else dumps(content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    text += "".join(f"\n  → {call.get('name')}({call.get('arguments')})" for call in calls)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + "…"
