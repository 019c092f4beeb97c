"""What must hold for any bytes, whoever sent them: a value or an error of ours, soon, in bounded memory."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mutations import bombs, mutated
from pydantic import ValidationError

from envbus.bus.calls import read_call
from envbus.bus.codec import Limits, decode, decode_map, encode
from envbus.bus.messages import Parts, parse
from envbus.bus.transfer import Assembly, cut, pack_body, unpack_body
from envbus.errors import BadRequestError, CodecError, EnvbusError

LIMITS = Limits(max_bytes=2**22, max_depth=32, max_nodes=5_000)
MAX_BODY_BYTES = 2**22
SLOW_S = 10.0
"""No single input may take nearly so long; generous, as machines stall."""

VALUE = {
    "input": {"prompt": [{"role": "user", "content": "é\ud800"}], "example_id": 7, "info": {"a": [1.5, None, True]}},
    "model": "m",
    "sampling_args": {"n": 2**70, "stop": ["\n"], "logit_bias": {str(n): -n for n in range(20)}},
    "state_columns": ["a"],
    "ids": list(range(5_000)),
    "array": np.arange(12, dtype=np.float32).reshape(3, 4),
    "raw": b"\xff" * 40,
}
CORPUS = [
    encode(VALUE),
    encode({"group_inputs": [VALUE["input"]] * 3, "model": ""}),
    encode({"v": 1, "t": "check", "client": "c", "jobs": ["a", "b"]}),
    encode({"v": 1, "t": "run", "job": "j", "attempt": 1, "client": "c", "call": "rollout", "size": 1, "body": b"x"}),
    encode([[[[]]], {"a": {"b": {}}}, -1, 2**63, 1e300, "s" * 300]),
]


@dataclass
class Report:
    """What a campaign saw."""

    inputs: int = 0
    decoded: int = 0
    parsed: int = 0
    slowest_s: float = 0.0
    broken: list[str] = field(default_factory=list)


def check_bytes(data: bytes, report: Report) -> None:
    """Give the bytes to every reader of bytes."""
    started = time.monotonic()
    report.inputs += 1
    for reader in (_decode, _parse, _call, _body, _extension):
        try:
            reader(data, report)
        except Exception as error:  # noqa: BLE001 - whatever comes out here is what is looked for
            report.broken.append(f"{reader.__name__}: {type(error).__name__}: {error}; input {data[:200].hex()}")
    report.slowest_s = max(report.slowest_s, time.monotonic() - started)


def _decode(data: bytes, report: Report) -> None:
    try:
        value = decode(data, limits=LIMITS)
    except CodecError:
        return
    report.decoded += 1
    again = encode(value, limits=Limits(max_bytes=2**25, max_depth=32, max_nodes=20_000))
    assert encode(decode(again)) == again, "decode(encode(x)) is not stable"


def _parse(data: bytes, report: Report) -> None:
    try:
        parse(data)
    except EnvbusError:
        return
    report.parsed += 1


def _call(data: bytes, report: Report) -> None:
    try:
        read_call(decode_map(data, limits=LIMITS))
    except (CodecError, BadRequestError):
        return


def _body(data: bytes, report: Report) -> None:
    try:
        unpack_body(data, "zstd", max_bytes=MAX_BODY_BYTES)
    except CodecError:
        return


def _extension(data: bytes, report: Report) -> None:
    """The same bytes inside each extension type of ours."""
    for code in (1, 2, 3):
        try:
            decode(b"\xc9" + struct.pack(">Ib", len(data), code) + data, limits=LIMITS)
        except CodecError:
            continue


def random_inputs(rng: random.Random, corpus: Sequence[bytes] = CORPUS) -> Iterator[bytes]:
    """Mutants for ever; the frames of compressed bodies and plain noise are among them."""
    frames = [pack_body(body * 400).data for body in corpus[:2]]
    seeds = [*corpus, *frames]
    while True:
        yield mutated(rng.choice(seeds), seeds, rng) if rng.random() < 0.95 else rng.randbytes(rng.randrange(200))


def check_announcements(rng: random.Random, report: Report) -> None:
    """Parts that contradict themselves, come twice, in any order, or with other bytes."""
    body = rng.randbytes(rng.randrange(1, 5_000))
    parts = cut(pack_body(body), rng.randrange(1, 600))
    lie = {rng.choice(list(Parts.model_fields)): rng.choice((0, 1, 7, 2**20, 2**40, 2**62))}
    try:
        assembly = Assembly(Parts.model_validate(parts.model_dump() | lie), max_bytes=MAX_BODY_BYTES)
        for index in rng.sample(range(parts.parts), parts.parts):
            assembly.put(index, body[index * parts.part_bytes : (index + 1) * parts.part_bytes])
        assembly.body()
    except (CodecError, ValidationError):
        pass
    except Exception as error:  # noqa: BLE001 - as above
        report.broken.append(f"parts {lie}: {type(error).__name__}: {error}")


def peak_of(action: Callable[[], Any]) -> int:
    """Return the most memory that Python had for it, in bytes."""
    with _traced():
        action()
        return tracemalloc.get_traced_memory()[1]


@contextmanager
def _traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def check_bombs(report: Report) -> dict[str, int]:
    """Give every bomb to every reader; the peak of memory of each."""
    peaks: dict[str, int] = {}
    for name, bomb in bombs().items():
        check_bytes(bomb, report)
        traced = Report()  # tracing makes it many times slower
        peaks[name] = peak_of(lambda bomb=bomb, traced=traced: check_bytes(bomb, traced))
        report.broken += traced.broken
    return peaks
