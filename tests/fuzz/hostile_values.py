"""Values whose own code misbehaves, as an environment may return them, and strategies that nest them."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st
from pydantic import BaseModel


class Raises:
    """Every question to it fails."""

    def _fail(self, *args: Any) -> Any:
        raise RuntimeError("\ud800 no" * 1_000)

    __str__ = __repr__ = __eq__ = __len__ = __iter__ = __bool__ = __getitem__ = _fail  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        raise ValueError(name)


class Unhashable(Raises):
    __hash__ = None  # type: ignore[assignment]


class NoText(str):
    """A string with a mind of its own."""

    def __str__(self) -> str:
        raise RuntimeError

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return True


class OddInt(int):
    def __index__(self) -> int:
        raise RuntimeError

    def __int__(self) -> int:
        raise RuntimeError


class BadDict(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise KeyError("items")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError


class BadList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError

    def __len__(self) -> int:
        return 2**62


class Endless:
    def model_dump(self) -> Any:
        return Endless()


class Growing:
    def model_dump(self) -> Any:
        return {"more": Growing()}


class FalseDump:
    model_dump = 5


class LiesAboutItself:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("no class")


class Colour(enum.Enum):
    OBJECT = object()


class Flags(enum.IntFlag):
    A = 1
    B = 2


@dataclass
class Node:
    inner: Any

    @property
    def broken(self) -> Any:
        raise RuntimeError


class Model(BaseModel):
    inner: Any = None


class Cut(BaseException):
    """No Exception."""


def itself(container: type) -> Any:
    if container is dict:
        value: Any = {}
        value["me"] = [value]
    else:
        value = []
        value.append((value,))
    return value


def deep(levels: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = None
    for _ in range(levels):
        value = wrap(value)
    return value


def object_array() -> Any:
    array = np.empty(2, dtype=object)
    array[0] = Raises()
    return array


HOSTILE: dict[str, Callable[[], Any]] = {
    "raises": Raises,
    "unhashable": Unhashable,
    "class of raises": lambda: Raises,
    "str without text": lambda: NoText("x"),
    "int without value": lambda: OddInt(5),
    "dict subclass": lambda: BadDict(a=1),
    "list subclass": lambda: BadList([1, 2]),
    "user dict": lambda: UserDict({1: 2}),
    "ordered dict": lambda: OrderedDict(a=OrderedDict()),
    "default dict": lambda: defaultdict(list, {"a": [1]}),
    "endless dump": Endless,
    "growing dump": Growing,
    "dump is a number": FalseDump,
    "class raises": LiesAboutItself,
    "enum of an object": lambda: Colour.OBJECT,
    "flags": lambda: Flags.A | Flags.B,
    "dict in itself": lambda: itself(dict),
    "list in itself": lambda: itself(list),
    "3,000 lists deep": lambda: deep(3_000, lambda value: [value]),
    "3,000 nodes deep": lambda: deep(3_000, Node),
    "3,000 models deep": lambda: deep(3_000, lambda value: Model.model_construct(inner=value)),
    "generator": lambda: (1 for _ in ()),
    "range": lambda: range(10**12),
    "huge int": lambda: 10**5_000,
    "int of a megabyte": lambda: 1 << 8_000_000,
    "signalling NaN": lambda: Decimal("sNaN"),
    "surrogates": lambda: "\ud800\udfff",
    "surrogate key": lambda: {"\ud800": 1},
    "module": lambda: st,
    "exception": lambda: RuntimeError(Raises()),
    "memoryview": lambda: memoryview(b"abcd").cast("H"),
    "strided memoryview": lambda: memoryview(bytes(10))[::3],
    "object array": object_array,
    "structured array": lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "U3")]),
    "datetime array": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
    "NaT": lambda: np.datetime64("NaT"),
    "broadcast array": lambda: np.broadcast_to(np.int8(1), (3, 4)),
    "masked array": lambda: np.ma.masked_array([1, 2], [True, False]),
    "record": lambda: np.zeros(1, dtype=[("a", "i4")])[0],
    "longdouble": lambda: np.longdouble("1e4000"),
    "colliding keys": lambda: {1: "a", "1": "b"},
    "unprintable key": lambda: {Raises(): 1},
    "str key without text": lambda: {NoText("k"): 1},
    "tuple key": lambda: {(1, (2,)): {frozenset({3}): 4}},
    "mixed set": lambda: {1, "a", None, (2,)},
    "set of raises": lambda: {Raises()},
}

# Hypothesis itself asks for the class of what it draws.
hostile = st.sampled_from(sorted(HOSTILE.keys() - {"class raises"})).map(lambda name: HOSTILE[name]())
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5))
nested = st.recursive(
    st.one_of(hostile, plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Node, inner),
        st.builds(lambda value: Model.model_construct(inner=value), inner),
        st.tuples(inner, inner),
        st.builds(lambda value: UserDict({"u": value}), inner),
    ),
    max_leaves=8,
)
