"""What the library's own server and client of 0.4 give for a task, and episodes made comparable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.episode import WireEpisode
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.delta import EpisodeAssembly, TraceSummary
from verifiers.v1.serve.server import EnvServer

TIMES = {"time", "timestamp", "timing"}
SAMPLING = {"temperature": 0.5, "seed": 5}
"""With the seed an answer depends on the messages alone."""


@contextlib.asynccontextmanager
async def stock_client(env_id: str, env_args: dict[str, Any]) -> AsyncIterator[EnvClient]:
    """The library's client, connected to its server of this environment."""
    taskset = {"id": env_id, **env_args.get("taskset", {})}
    server = EnvServer(vf.resolve_env_config({**env_args, "taskset": taskset}), "tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        await client.wait_for_server_startup()
        yield client
    finally:
        await client.close()
        serving.cancel()
        await serving


def their_client(base_url: str, **settings: Any) -> vf.EvalClientConfig:
    """An endpoint without keys, as the library says it."""
    return vf.EvalClientConfig(base_url=base_url, **{"api_key_var": "EMPTY", **settings})


def their_request(task_data: dict[str, Any], client: vf.EvalClientConfig, **sampling: Any) -> Any:
    """A rollout input as the gateway makes it of what the library's client sends."""
    request = {"client": client.model_dump(mode="json"), "task_data": task_data}
    return {**request, "sampling": vf.SamplingConfig(**SAMPLING, **sampling).model_dump(mode="json")}


class Assembly:
    """An episode put together from progress, as the library's client does."""

    def __init__(self) -> None:
        self.deltas: list[dict[str, Any]] = []
        self._assembly = EpisodeAssembly()

    def on_progress(self, progress: Any) -> None:
        assert (progress.attempt, progress.number) == (1, len(self.deltas) + 1)
        self.deltas.append(progress.data)
        self._assembly.apply(progress.data)

    def episode(self, output: Any) -> WireEpisode:
        said = output["episode"]
        return WireEpisode.model_validate(self._assembly.finish(said["head"], [_size(each) for each in said["traces"]]))


def _size(trace: dict[str, Any]) -> TraceSummary:
    """Of a whole trace, or as it was sent."""
    sizes = {name: len(trace[name]) if isinstance(trace[name], list) else trace[name] for name in ("nodes", "calls")}
    return TraceSummary(id=trace["id"], **sizes)


def whole(output: Any) -> WireEpisode:
    """The episode of a call of ours."""
    return WireEpisode.model_validate({**output["episode"]["head"], "traces": output["episode"]["traces"]})


def differences(episode: WireEpisode, other: WireEpisode) -> list[str]:
    """Where two episodes differ, but for ids and times, which differ between two runs of the library, too."""
    left, right = (_without_times(each.model_dump(mode="json")) for each in (episode, other))
    return list(_differences(left, right, ""))


def _differences(left: Any, right: Any, path: str) -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict) and set(left) == set(right):
        pairs: Any = [(key, left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = zip(range(len(left)), left, right, strict=True)
    else:
        pairs = []
        if left != right:
            yield f"{path}: {left!r:.200} is not {right!r:.200}"
    for key, one, two in pairs:
        yield from _differences(one, two, f"{path}/{key}")


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(each) for key, each in value.items() if key not in TIMES and not _is_id(key, value)}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def _is_id(key: str, fields: dict[str, Any]) -> bool:
    """The id of an episode, a trace, or a runtime's box; not that of a plugin or a task."""
    return key == "id" and bool({"traces", "nodes", "type"} & set(fields)) and "prompt" not in fields
