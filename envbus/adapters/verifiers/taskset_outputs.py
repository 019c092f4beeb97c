"""An episode as a RolloutOutput: the episode itself, and the fields that evaluations read, taken from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.serve.delta import dump

from envbus.adapters.verifiers.taskset_errors import episode_error
from envbus.adapters.verifiers.taskset_examples import prompt_of
from envbus.adapters.verifiers.taskset_requests import is_of_their_client
from envbus.adapters.verifiers.taskset_stream import plain


def episode_output(episode: Any, input: Mapping[str, Any], *, was_watched: bool, total_s: float) -> dict[str, Any]:
    """The output of one episode; ``reward`` is None when it failed.

    Args:
        episode: How it ended.
        input: What it was asked for with; one of the library's own clients gets no messages beside the episode.
        was_watched: Whether its traces were reported: then one of the library's own clients gets only their sizes.
        total_s: How long it took.
    """
    error = episode_error(episode)
    is_theirs = is_of_their_client(input)
    output = {
        "example_id": input.get("example_id", episode.task.data.idx),
        "reward": None if error else _reward(episode),
        "metrics": _metrics(episode),
        "timing": _timing(episode, total_s),
        "is_completed": error is None,
        "is_truncated": any(trace.is_truncated for trace in episode.traces),
        "stop_condition": _stop_condition(episode),
        "error": error,
        "token_usage": _token_usage(episode),
        "episode": _episode(episode, with_traces=not (is_theirs and was_watched)),
    }
    return output if is_theirs else {**output, **_messages(episode, input)}


def _episode(episode: Any, *, with_traces: bool) -> dict[str, Any]:
    head = plain(dump(episode, exclude={"traces"}))
    if with_traces:
        return {"head": head, "traces": [plain(dump(trace)) for trace in episode.traces]}
    sizes = [{"id": trace.id, "nodes": len(trace.nodes), "calls": len(trace.calls)} for trace in episode.traces]
    return {"head": head, "traces": sizes}


def _messages(episode: Any, input: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt and completion: those of the first trace that trains the policy, on its last branch."""
    trace = next((each for each in episode.traces if each.agent.trainable), None)
    nodes = trace.branches[-1].nodes if trace is not None and trace.nodes else []
    start = next((number for number, node in enumerate(nodes) if node.sampled), len(nodes))
    messages = [message_to_wire(node.message) for node in nodes]
    return {
        "prompt": messages[:start] or input.get("prompt") or prompt_of(episode.task.data),
        "completion": messages[start:],
        "answer": input.get("answer", ""),
        "info": input.get("info", {}),
        "trajectory": [],
        **({"env_id": input["env_id"]} if "env_id" in input else {}),
    }


def _reward(episode: Any) -> float:
    """As the library scores an episode: the mean over its traces that were given rewards."""
    rewards = [float(trace.reward) for trace in episode.traces if trace.rewards]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _metrics(episode: Any) -> dict[str, float]:
    """Metrics and unweighted rewards by name; of several traces the mean."""
    found: dict[str, list[float]] = defaultdict(list)
    for trace in episode.traces:
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**trace.metrics, **scores}.items():
            found[name].append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}


def _timing(episode: Any, total_s: float) -> dict[str, float]:
    """Sums over the traces, but for the start and the total."""
    timings = [trace.timing for trace in episode.traces]
    return {
        "start_time": min((timing.start for timing in timings), default=0.0),
        "setup_s": sum(timing.boot.duration + timing.setup.duration for timing in timings),
        "generation_s": sum(timing.agent.duration for timing in timings),
        "scoring_s": sum(timing.finalize.duration + timing.scoring.duration for timing in timings),
        "model_s": sum(timing.agent.model.duration for timing in timings),
        "total_s": total_s,
    }


def _stop_condition(episode: Any) -> str | None:
    if episode.is_timeout:
        return "episode_timeout"
    conditions = [trace.stop_condition for trace in episode.traces]
    return conditions[-1] if conditions else None


def _token_usage(episode: Any) -> dict[str, int] | None:
    usage = episode.usage
    return None if usage is None else {"input_tokens": usage.input_tokens, "output_tokens": usage.completion_tokens}
