"""The environment that the end-to-end tests serve: each input says what shall happen.

It writes what starts, ends and is cancelled to a ledger file, one JSON line each,
so that a test sees what really ran, in which process and for which job.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import functools
import json
import os
import pathlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from envbus.environments import progress
from envbus.errors import InfraError, OverlongPromptError


class StageBrokenError(Exception):
    """Known only where this module is."""


class SandboxError(InfraError):
    """Two levels below RolloutError."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class PanicError(BaseException):
    """As extension modules raise when they panic: not an Exception."""


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Point:
    x: int
    y: float


class Note(BaseModel):
    text: str
    raw: bytes = b"\xff\x00"


class BrokenModel(BaseModel):
    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        raise RuntimeError("this dump always fails")


def itself() -> dict[str, Any]:
    loop: dict[str, Any] = {"a": 1}
    loop["loop"] = loop
    return loop


def too_deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5000):
        value = [value]
    return value


ODD: dict[str, Callable[[], Any]] = {
    # P04: nothing that has a form of its own on the wire
    "object": object,
    "generator": lambda: (i for i in range(3)),
    "file": lambda: open(os.devnull),  # noqa: SIM115 - its fate on the bus is the point
    "recursion": itself,
    "broken_model": BrokenModel,
    "lambda": lambda: lambda: 0,
    "too_deep": too_deep,
    "surrogate": lambda: "a\ud800b",
    # P28
    "float32": lambda: np.float32(0.5),
    "int64": lambda: np.int64(3),
    "bool_": lambda: np.bool_(True),
    "float64": lambda: np.float64(1),
    "float16_array": lambda: np.arange(12, dtype=np.float16).reshape(3, 4),
    "zero_dim": lambda: np.array(7),
    "empty_array": lambda: np.zeros((0, 3), np.int32),
    "strided": lambda: np.arange(20, dtype=np.int64)[::2],
    "big_endian": lambda: np.arange(4, dtype=">i4"),
    # P29
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "minus_inf": lambda: float("-inf"),
    # P38
    "int_keys": lambda: {7: "a", None: 0, True: 2, 0.5: 3},
    # P41
    "set": lambda: {3, 1, 2},
    "frozenset": lambda: frozenset({"b", "a"}),
    "tuple": lambda: (1, (2, 3)),
    "path": lambda: pathlib.PurePosixPath("/x/y"),
    "aware": lambda: datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "naive": lambda: datetime.datetime(2026, 1, 2, 3, 4, 5),
    "decimal": lambda: decimal.Decimal("1.50"),
    "uuid": lambda: uuid.UUID(int=5),
    "enum": lambda: Colour.RED,
    "int_enum": lambda: Level.HIGH,
    "bytes": lambda: b"\xff\x00",
    "bytearray": lambda: bytearray(b"\xff\x00"),
    "dataclass": lambda: Point(1, 2.5),
    "model": lambda: Note(text="hi"),
    "big_int": lambda: 2**70,
    "error": lambda: ValueError("bad"),
}


@functools.cache
def tokens(count: int) -> dict[str, Any]:
    """What a rollout gives a trainer: 13 bytes for each token, which do not compress."""
    random = np.random.default_rng(count)
    return {
        "ids": random.integers(0, 150_000, count).tolist(),
        "mask": random.integers(0, 2, count).tolist(),
        "logprobs": (-random.random(count)).tolist(),
    }


def failure(kind: str) -> BaseException:
    """What the ``raise`` action raises (P30, P31)."""
    match kind:
        case "sandbox":
            error: BaseException = SandboxError("the sandbox is away")
            error.__cause__ = ConnectionResetError("peer hung up")
            return error
        case "overlong":
            return OverlongPromptError("9,000 tokens do not fit 8,192")
        case "own":
            return StageBrokenError("a class of the env's package")
        case "unprintable":
            return UnprintableError()
        case "long":
            return RuntimeError("x" * 2_000_000)
        case "panic":
            return PanicError("index out of bounds")
        case "exit":
            return SystemExit(3)
        case "cancelled":
            return asyncio.CancelledError()
    return RuntimeError(kind)


class StageEnv:
    """Implements the hosting protocol by hand: no class of envbus beneath it."""

    def __init__(self, ledger: str, *, groups: bool, teardown_s: float, tag: str) -> None:
        self._ledger = ledger
        self._teardown_s = teardown_s
        self._tag = tag
        self._running = 0
        self._buffer: list[int] = []
        self.requires_group_rollouts = groups

    async def run_rollout(
        self,
        input: Any,
        client: Any,
        model: str,
        sampling_args: Any = None,
        max_retries: int = 0,
        state_columns: Any = None,
    ) -> Any:
        self._running += 1
        try:
            self._note("start", input, running=self._running)
            extra = await self._act(input)
        except asyncio.CancelledError:
            await asyncio.sleep(input.get("cleanup_s", 0))
            self._note("cancelled", input)
            raise
        finally:
            self._running -= 1
        self._note("end", input)
        return {"example_id": input["example_id"], "reward": 1.0, "tag": self._tag, "pid": os.getpid()} | extra

    async def run_group(
        self,
        group_inputs: list[Any],
        client: Any,
        model: str,
        sampling_args: Any = None,
        max_retries: int = 0,
        state_columns: Any = None,
    ) -> Any:
        outputs = await asyncio.gather(*(self._member(item, model) for item in group_inputs))
        scored = [output for output in outputs if output.get("error") is None]
        for rank, output in enumerate(scored):
            output["reward"] = float(rank)
        drop = group_inputs[0].get("drop", 0)
        return outputs[: len(outputs) - drop]

    async def _member(self, item: Any, model: str) -> Any:
        try:
            return await self.run_rollout(item, None, model)
        except RuntimeError as error:
            return {"example_id": item["example_id"], "reward": None, "error": {"error": type(error).__name__}}

    async def _act(self, item: Any) -> dict[str, Any]:
        match item.get("do", "slow"):
            case "slow":
                await asyncio.sleep(item.get("t", 0))
            case "slow_then":
                again = self._starts(item) > 1
                await asyncio.sleep(item["t_again"] if again else item["t"])
            case "busy":
                until = time.monotonic() + item["t"]
                while time.monotonic() < until:
                    sum(range(1000))
            case "block":
                while os.path.exists(item["while"]):  # noqa: ASYNC240
                    time.sleep(0.01)  # noqa: ASYNC251 - an env that blocks its loop
            case "big":
                await asyncio.sleep(item.get("t", 0))
                return {"blob": os.urandom(item["n"])}
            case "tokens":
                return tokens(item["n"])
            case "reuse":
                self._buffer[:] = [item["fill"]] * item["n"]
                return {"ids": self._buffer}
            case "clock":
                return {"thread_s": time.thread_time()}
            case "echo_size":
                return {"size": len(item["prompt"][0]["content"])}
            case "odd":
                return {"odd": {name: ODD[name]() for name in item["names"]}}
            case "reward":
                return {"reward": ODD[item["name"]](), "metrics": {"m": ODD[item["name"]]()}}
            case "report":
                return await self._report(item)
            case "return":
                return {"odd": item["value"]}
            case "raise":
                raise failure(item["kind"])
            case "stubborn":
                with_cancels_ignored = asyncio.get_running_loop().time() + item["t"]
                while (left := with_cancels_ignored - asyncio.get_running_loop().time()) > 0:
                    try:
                        await asyncio.sleep(left)
                    except asyncio.CancelledError:
                        self._note("ignored", item)
        return {}

    async def _report(self, item: Any) -> dict[str, Any]:
        """Report ``n`` times, and then take ``t`` seconds the first time that this runs."""
        is_first = "t" not in item or self._starts(item) == 1
        for number in range(item["n"]):
            await progress.report({"n": number, "blob": bytes(item.get("size", 0))})
            if item.get("log"):
                self._note("reported", item, n=number)
            if item.get("every_s"):
                await asyncio.sleep(item["every_s"])
        await asyncio.sleep(item.get("t", 0) if is_first else 0)
        return {"wanted": progress.is_wanted()}

    def _starts(self, item: Any) -> int:
        with open(self._ledger) as ledger:
            entries = [json.loads(line) for line in ledger]
        return sum(e["event"] == "start" and e["example_id"] == item["example_id"] for e in entries)

    def eval_examples(self) -> list[dict[str, Any]]:
        return [{"prompt": [], "example_id": number, "t": 0.02} for number in range(16)]

    async def close(self) -> None:
        self._note("teardown", {"example_id": None})
        await asyncio.sleep(self._teardown_s)
        self._note("torn_down", {"example_id": None})

    def _note(self, event: str, item: Any, **more: Any) -> None:
        task = asyncio.current_task()
        entry = {"event": event, "example_id": item["example_id"], "pid": os.getpid(), "at": time.time()}
        entry["job"] = task.get_name() if task is not None else None
        note(self._ledger, entry | more)


def note(ledger: str, entry: dict[str, Any]) -> None:
    """Append one line in one write: several processes share the file."""
    line = json.dumps(entry).encode() + b"\n"
    fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def load_environment(
    ledger: str = os.devnull, groups: bool = False, load_s: float = 0, teardown_s: float = 0, tag: str = ""
) -> StageEnv:
    note(ledger, {"event": "loading", "example_id": None, "pid": os.getpid()})
    time.sleep(load_s)
    return StageEnv(ledger, groups=groups, teardown_s=teardown_s, tag=tag)
