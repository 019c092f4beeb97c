"""Outputs as a result's body: a copy of the moment, one bad output alone fails, and long lists copied in turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from envbus.bus.calls import Call, read_call
from envbus.bus.codec import decode_map, freeze
from envbus.server import turns
from envbus.server.results import ResultBody
from envbus.server.turns import CopyTurns

IDS = list(range(20_000))


def group(size: int) -> Call:
    return read_call({"group_inputs": [{"prompt": [], "example_id": number} for number in range(size)]})


def rollout() -> Call:
    return read_call({"input": {"prompt": [], "example_id": 0}})


def body(call: Call, outputs: list[Any]) -> dict[str, Any]:
    result = ResultBody(call, outputs)
    list(result.frozen.copy_lists())
    return decode_map(result.encode())


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(5_000):
        value = [value]
    return value


class Odd(dict[str, Any]):
    def keys(self) -> Any:
        raise RuntimeError("no")

    def __iter__(self) -> Any:
        raise RuntimeError("no")


def test_outputs_are_those_of_the_moment() -> None:
    """P34."""
    output: dict[str, Any] = {"reward": 1.0, "rows": [[1]], "ids": list(IDS)}
    result = ResultBody(rollout(), [output])
    output["rows"][0].append(2)
    output["reward"] = 2.0
    list(result.frozen.copy_lists())
    output["ids"].clear()
    assert decode_map(result.encode()) == {"output": {"reward": 1.0, "rows": [[1]], "ids": IDS}}


@pytest.mark.parametrize(
    "bad",
    [{"info": deep()}, {"n": 2**9000}, {"ids": [1] * 9_999 + [2**9000]}],
    ids=["too deep", "too long an integer", "too long an integer in a long list"],
)
def test_an_output_that_cannot_be_packed_fails_alone(bad: dict[str, Any]) -> None:
    """P04: whether it is found at once or only in packing."""
    good = {"reward": 1.0, "ids": IDS}
    first, failed, last = body(group(3), [good, bad, good])["outputs"]
    assert first == last == good
    assert (failed["example_id"], failed["reward"], failed["error"]["error"]) == (1, None, "EncodeError")
    assert body(rollout(), [bad])["output"]["error"]["error"] == "EncodeError"


def test_an_output_that_is_no_dict_in_the_end_fails_alone() -> None:
    good = {"reward": 1.0}
    failed, kept = body(group(2), [Odd(a=1), good])["outputs"]
    assert (failed["error"]["error"], kept) == ("RolloutError", good)


async def test_other_tasks_run_between_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """P34: so much is copied in one turn of the loop, over all outputs that end in it."""
    monkeypatch.setattr(turns, "MAX_TURN_ITEMS", len(IDS))
    copying, turn, seen = CopyTurns(), 0, []

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def copy() -> None:
        async with copying.copied(freeze({"a": IDS, "b": IDS}, copy_lists=False)):
            seen.append(turn)

    counting = asyncio.create_task(count())
    await asyncio.gather(copy(), copy())
    counting.cancel()
    assert seen[0] >= 2
    assert seen[1] >= 3


async def test_a_short_copy_takes_no_turn() -> None:
    frozen, turned = freeze({"a": IDS}, copy_lists=False), []
    asyncio.get_running_loop().call_soon(turned.append, 1)
    async with CopyTurns().copied(frozen):
        assert turned == []
        assert list(frozen.copy_lists()) == []


async def test_copies_that_wait_to_be_packed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """P33, P34: also when those before were cancelled."""
    monkeypatch.setattr(turns, "MAX_ITEMS", 2 * len(IDS))
    copying, entered = CopyTurns(), []
    packing = [asyncio.Event() for _ in range(4)]

    async def pack(number: int) -> None:
        async with copying.copied(freeze({"a": IDS}, copy_lists=False)):
            entered.append(number)
            await packing[number].wait()

    tasks = [asyncio.create_task(pack(number)) for number in range(4)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered == [0, 1]
    tasks[2].cancel()
    tasks[0].cancel()
    for event in packing:
        event.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in ends] == [True, False, True, False]
    assert entered == [0, 1, 3]
