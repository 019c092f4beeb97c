"""Anything an environment returns, and any bytes a stranger sends (CASES P04, P38, P41)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from byte_fuzz import SLOW_S, Report, check_announcements, check_bombs, check_bytes, random_inputs
from hostile_values import HOSTILE, Cut, nested
from hypothesis import HealthCheck, given, settings

from envbus.bus.codec import Limits, decode, encode
from envbus.errors import DecodeError, EncodeError

LIMITS = Limits(max_bytes=2**21, max_depth=40, max_nodes=20_000)


def survives(value: Any) -> None:
    try:
        data = encode(value, limits=LIMITS)
    except EncodeError:
        return
    assert len(data) <= LIMITS.max_bytes
    assert encode(decode(data, limits=LIMITS), limits=LIMITS) == data


@pytest.mark.parametrize("name", HOSTILE)
def test_each_hostile_value_has_bytes_or_a_typed_error(name: str) -> None:
    """P04, P41: alone, in a list, as a value, and beside a value that is none of this."""
    for wrap in (lambda v: v, lambda v: [v, v], lambda v: {"ok": 1, "bad": v}, lambda v: ({"a": [v]}, v)):
        survives(wrap(HOSTILE[name]()))


@given(nested)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_nested_hostile_values_have_bytes_or_a_typed_error(value: Any) -> None:
    survives(value)


def test_what_is_no_exception_is_not_swallowed() -> None:
    """A KeyboardInterrupt in somebody's __str__ is not the codec's to keep."""

    class Interrupts:
        def __str__(self) -> str:
            raise Cut

    with pytest.raises(Cut):
        encode(Interrupts())


@pytest.mark.parametrize("seed", range(3))
def test_mutated_bytes_are_values_or_typed_errors(seed: int) -> None:
    report, rng = Report(), random.Random(seed)
    inputs = random_inputs(rng)
    for _ in range(1_200):
        check_bytes(next(inputs), report)
        check_announcements(rng, report)
    assert not report.broken, report.broken[:5]
    assert report.decoded > 10, "some must get through, or nothing is tested"
    assert report.slowest_s < SLOW_S


def test_bombs_take_no_more_memory_than_the_limits_allow() -> None:
    """Each is a few bytes to a megabyte; the limits in force are 4 MiB and 5,000 containers."""
    report = Report()
    peaks = check_bombs(report)
    assert not report.broken, report.broken
    assert max(peaks.values()) < 24 * 2**20, peaks


def test_arrays_count_as_containers() -> None:
    """An empty one is 12 bytes on the wire and some 300 in memory."""
    arrays = [np.zeros(0)] * 50
    limits = Limits(max_nodes=50)
    with pytest.raises(EncodeError, match="more than 50 containers"):
        encode(arrays, limits=limits)
    with pytest.raises(DecodeError, match="more than 50 containers"):
        decode(encode(arrays), limits=limits)
    assert len(decode(encode(arrays[1:], limits=limits), limits=limits)) == 49
