"""Large bodies are worked on by threads of their own, whose end leaves nobody waiting (P34, P11)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from envbus.bus.bodies import BodyWorkers
from envbus.bus.codec import Limits, encode, freeze
from envbus.bus.transfer import unpack_body
from envbus.errors import BusClosedError, DecodeError, EncodeError

WAIT_S = 20
TOKENS = {"ids": [n % 1_000 for n in range(200_000)]}


@pytest.fixture
def workers() -> Iterator[BodyWorkers]:
    made = BodyWorkers()
    yield made
    made.stop()


class Gate:
    """Work that goes on until it is let go."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.opened.wait(WAIT_S)
        return threading.current_thread().name


async def blocked(workers: BodyWorkers, gate: Gate) -> asyncio.Task[str]:
    task = asyncio.create_task(workers.run(gate))
    assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
    return task


async def test_small_bodies_stay_on_the_callers_thread(workers: BodyWorkers) -> None:
    before = threading.active_count()
    packed = await workers.pack(freeze({"a": [1] * 100}))
    assert await workers.unpack(lambda: packed.data, packed.raw_size, limits=Limits()) == {"a": [1] * 100}
    assert threading.active_count() == before


async def test_large_bodies_come_back_whole(workers: BodyWorkers) -> None:
    packed = await workers.pack(freeze(TOKENS))
    assert packed.encoding == "zstd"

    def body() -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        return unpack_body(packed.data, packed.encoding, max_bytes=packed.raw_size)

    assert await workers.unpack(body, packed.raw_size, limits=Limits()) == TOKENS


async def test_errors_come_back_as_they_are(workers: BodyWorkers) -> None:
    with pytest.raises(EncodeError, match="integer"):
        await workers.pack(freeze({"ids": [1] * 50_000 + [2**9000]}))
    with pytest.raises(DecodeError):
        await workers.unpack(lambda: encode(TOKENS)[:-1], 10**6, limits=Limits())


async def test_a_cancel_frees_the_caller_at_once_and_the_work_ends_by_itself(workers: BodyWorkers) -> None:
    gate = Gate()
    task = await blocked(workers, gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.opened.set()
    assert (await workers.run(threading.current_thread)).name.startswith("envbus-bodies")


async def test_stop_ends_what_waits_and_finishes_what_runs() -> None:
    workers, gates = BodyWorkers(), [Gate(), Gate()]
    running = [await blocked(workers, gate) for gate in gates]
    waiting = asyncio.create_task(workers.pack(freeze(TOKENS)))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(asyncio.to_thread(workers.stop))
    with pytest.raises(BusClosedError):
        await waiting
    for gate in gates:
        gate.opened.set()
    for task in running:
        assert (await task).startswith("envbus-bodies")
    await stopping
    with pytest.raises(BusClosedError):
        await workers.run(threading.current_thread)
