"""Strict JSON that reads back as the same values."""

import enum
import json
import math
from dataclasses import dataclass
from datetime import date
from pathlib import PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbus.errors import EncodeError
from envbus.evaluation import strict_json

KEYS = st.text(max_size=5) | st.sampled_from(["$float", "$bytes", "$$float", "$repr", "$"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


@given(VALUES)
def test_values_come_back_unchanged(value):
    """P29: NaN and infinities too, as text that a strict parser reads."""
    text = strict_json.dumps(value)
    json.loads(text, parse_constant=refuse)
    assert "\n" not in text
    np.testing.assert_equal(strict_json.loads(text), value)


@given(st.floats())
def test_floats_keep_their_value(value):
    back = strict_json.loads(strict_json.dumps({"reward": value}))["reward"]
    assert back == value or (math.isnan(back) and math.isnan(value))


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: float
    y: float


@pytest.mark.parametrize(
    ("value", "saved"),
    [
        (np.array([1, 2]), [1, 2]),
        (np.float32(0.5), 0.5),
        ((1, 2), [1, 2]),
        ({2, 1}, [1, 2]),
        ({1: "a", None: "b"}, {"1": "a", "null": "b"}),
        ({(1, 2): "a"}, {"(1, 2)": "a"}),
        (Colour.RED, "red"),
        (Point(1.0, 2.0), {"x": 1.0, "y": 2.0}),
        (date(2026, 1, 2), "2026-01-02"),
        (PurePosixPath("a/b"), "a/b"),
        ("\ud800", "\ud800"),
    ],
    ids=str,
)
def test_python_values_get_a_stated_form(value, saved):
    assert strict_json.loads(strict_json.dumps({"value": value})) == {"value": saved}


def test_non_finite_values_inside_arrays_and_dataclasses():
    text = strict_json.dumps([np.array([1.0, np.nan]), Point(math.inf, 0.0)])
    np.testing.assert_equal(strict_json.loads(text), [[1.0, math.nan], {"x": math.inf, "y": 0.0}])


def test_an_object_becomes_its_repr():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no")

    assert strict_json.loads(strict_json.dumps([Broken(), range(3)])) == [
        {"$repr": "<Broken whose repr raises>"},
        {"$repr": "range(0, 3)"},
    ]


def test_what_cannot_be_written_is_an_error():
    loop: list = []
    loop.append(loop)
    for value in (loop, 10**5000):
        with pytest.raises(EncodeError):
            strict_json.dumps(value)
