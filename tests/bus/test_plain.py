"""The fate of each kind of value (CASES P04, P28, P29, P38, P41), the same in local runs and over the bus."""

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import logging
import math
import pathlib
import sys
import types
import uuid
from typing import Any

import numpy as np
import pydantic
import pytest

from envbus.bus import foreign
from envbus.bus.codec import Limits, decode, encode, to_plain
from envbus.errors import EncodeError


@pytest.fixture(autouse=True)
def _warnings_start_anew() -> None:
    foreign._warn_once.cache_clear()


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Mode(enum.StrEnum):
    FAST = "fast"


class Inner(pydantic.BaseModel):
    blob: bytes
    tags: set[str] = set()


class Outer(pydantic.BaseModel):
    inner: Inner
    note: str | None = None


class OwnDump(pydantic.BaseModel):
    x: int = 1

    def model_dump(self) -> dict[str, Any]:  # type: ignore[override]
        return {"own": self.x}


@dataclasses.dataclass
class Node:
    name: str
    next: Any = None


Pair = collections.namedtuple("Pair", "a b")
NOON = dt.datetime(2026, 1, 2, 12, 0, 1)

KINDS: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (-5, -5),
    (2**64 - 1, 2**64 - 1),
    (2**64, 2**64),
    (-(2**63) - 1, -(2**63) - 1),
    (10**2000, 10**2000),
    (1.5, 1.5),
    (math.inf, math.inf),
    (-math.inf, -math.inf),
    ("é😀", "é😀"),
    ("lone \ud83d surrogate", "lone \ud83d surrogate"),
    (b"\xff\x00", b"\xff\x00"),
    (bytearray(b"\xff\x00"), b"\xff\x00"),
    (memoryview(b"abcd")[::2], b"ac"),
    ((1, (2, "x")), [1, [2, "x"]]),
    (Pair(1, [2]), [1, [2]]),
    (collections.deque([1, 2]), [1, 2]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset("ba"), ["a", "b"]),
    (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (types.MappingProxyType({"a": (1,)}), {"a": [1]}),
    (collections.Counter("aab"), {"a": 2, "b": 1}),
    (Colour.RED, "red"),
    (Level.HIGH, 3),
    (Mode.FAST, "fast"),
    (NOON, "2026-01-02T12:00:01"),
    (NOON.replace(tzinfo=dt.UTC), "2026-01-02T12:00:01+00:00"),
    (NOON.date(), "2026-01-02"),
    (NOON.time(), "12:00:01"),
    (pathlib.Path("/x/y"), "/x/y"),
    (pathlib.PureWindowsPath("a\\b"), "a/b"),
    (decimal.Decimal("1.10"), "1.10"),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (ValueError("bad"), "ValueError('bad')"),
    (Outer(inner=Inner(blob=b"\xff", tags={"t"})), {"inner": {"blob": b"\xff", "tags": ["t"]}, "note": None}),
    (OwnDump(), {"own": 1}),
    (Node("a", Node("b")), {"name": "a", "next": {"name": "b", "next": None}}),
    (np.float32(0.5), 0.5),
    (np.float64(1), 1.0),
    (np.longdouble(0.25), 0.25),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (np.str_("s"), "s"),
    (np.datetime64("2026-01-02"), "2026-01-02"),
    ([np.float32(0.5), 1], [0.5, 1]),
    (np.array(["a", "b"]), ["a", "b"]),
    (np.array([{"k": np.int8(1)}, None], dtype=object), [{"k": 1}, None]),
    (np.array(["2026-01-02"], dtype="datetime64[D]"), ["2026-01-02"]),
    (np.ma.array([1, 2], mask=[False, True]), [1, None]),
]


def exact(value: Any) -> Any:
    """The value with its types spelled out, since ``1 == True == 1.0``."""
    if type(value) is dict:
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if type(value) is list else (type(value), value)


@pytest.mark.parametrize(("value", "expected"), KINDS, ids=lambda v: type(v).__name__)
def test_each_kind_has_one_fate_locally_and_on_the_wire(value: Any, expected: Any) -> None:
    """P04, P28, P41."""
    assert exact(to_plain({"k": value})) == exact({"k": expected})
    assert exact(decode(encode({"k": value}))) == exact({"k": expected})


def test_nan_crosses_unchanged() -> None:
    """P29."""
    plain = decode(encode([1.0, math.nan, np.float32("nan")]))
    assert plain[0] == 1.0
    assert [type(v) for v in plain] == [float] * 3
    assert math.isnan(plain[1])
    assert math.isnan(plain[2])


ARRAYS = {
    "float16 matrix": np.arange(12, dtype=np.float16).reshape(3, 4),
    "0-d": np.array(2.5, dtype=np.float32),
    "empty": np.empty((0, 3), dtype=np.int16),
    "strided": np.arange(20, dtype=np.int64).reshape(4, 5)[::2, 1::2],
    "fortran": np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">f8"),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j, 3], dtype=np.complex64),
    "read-only": np.broadcast_to(np.float32(1), (2, 2)),
    "subclass": np.arange(4).reshape(2, 2).view(np.recarray),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_keep_dtype_and_shape(array: Any) -> None:
    """P28."""
    for result in (to_plain({"a": array})["a"], decode(encode({"a": array}))["a"]):
        assert type(result) is np.ndarray
        assert result.dtype.name == array.dtype.name
        assert result.dtype.byteorder in "=<|"
        assert result.shape == array.shape
        assert np.array_equal(result, array)
    assert decode(encode(array)).flags.writeable


def test_an_enum_or_object_array_around_an_array_is_normalised_too() -> None:
    class Table(enum.Enum):
        ROWS = np.arange(6, dtype=">i4").reshape(2, 3).T

    assert np.array_equal(decode(encode(Table.ROWS)), Table.ROWS.value)


def test_an_absurd_empty_array_becomes_text() -> None:
    assert to_plain(np.empty((2**40, 0), dtype=np.int8)).startswith("[")


class StandInTensor:
    """Only what the conversion calls; torch itself is not needed to run the suite."""

    def __init__(self, array: Any, dtype: str) -> None:
        self.array, self.dtype, self.calls = array, dtype, []

    def detach(self) -> "StandInTensor":
        return self

    def cpu(self) -> "StandInTensor":
        return self

    def float(self) -> "StandInTensor":
        return StandInTensor(self.array.astype(np.float32), "float32")

    def numpy(self) -> Any:
        if self.dtype == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


def test_tensors_become_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """P28, with a stand-in for torch: shows the detection and the calls, not torch's own behaviour."""
    stand_in = types.SimpleNamespace(Tensor=StandInTensor, bfloat16="bfloat16")
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    transposed = StandInTensor(np.arange(6.0).reshape(2, 3).T, "float64")
    assert np.array_equal(decode(encode(transposed)), transposed.array)
    bfloat = decode(encode({"t": StandInTensor(np.array([0.5, 1]), "bfloat16")}))["t"]
    assert bfloat.dtype == np.float32


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (1, "1"),
        (True, "true"),
        (None, "null"),
        (0.5, "0.5"),
        (math.nan, "NaN"),
        ((1, 2), "(1, 2)"),
        (b"raw", "raw"),
        (b"\xff", "b'\\xff'"),
        (Colour.RED, "red"),
        (Level.HIGH, "3"),
        (np.int64(7), "7"),
        (np.float32(0.5), "0.5"),
        (np.str_("s"), "s"),
        (10**5000, "<int: unprintable>"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_keys_become_strings_as_json_would_write_them(key: Any, text: str) -> None:
    """P38."""
    assert to_plain({key: "a"}) == {text: "a"}
    assert decode(encode({key: ["a"]})) == {text: ["a"]}
    assert type(next(iter(to_plain({key: 0})))) is str


def test_keys_that_collide_are_refused_with_their_path() -> None:
    """P38."""
    with pytest.raises(EncodeError, match="same string '1'") as caught:
        to_plain({"info": [{}, {1: "a", "1": "b"}]})
    assert caught.value.path == "info[1]"


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class HostileDump(Hostile):
    def model_dump(self) -> Any:
        raise RuntimeError("no")


class HostileMapping(dict[str, Any]):
    def keys(self) -> Any:
        raise RuntimeError("no")

    def __iter__(self) -> Any:
        raise RuntimeError("no")


class Chatty:
    def __str__(self) -> str:
        return "x" * 10**6


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Hostile(), "<Hostile: unprintable>"),
        (HostileDump(), "<HostileDump: unprintable>"),
        (HostileMapping(a=1), "{'a': 1}"),
        (Chatty(), "x" * 2000 + "…"),
        (1 + 2j, "(1+2j)"),
        (dt.timedelta(hours=1), "1:00:00"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_unknown_values_become_bounded_text(value: Any, expected: str) -> None:
    """P04."""
    assert decode(encode({"state": [value]})) == {"state": [expected]}


def test_generators_files_and_plain_objects_become_text(tmp_path: pathlib.Path) -> None:
    """P04."""
    with (tmp_path / "f").open("w") as handle:
        plain = to_plain([object(), (n for n in range(3)), handle, print])
    assert [text.split()[0] for text in plain] == ["<object", "<generator", "<_io.TextIOWrapper", "<built-in"]


def test_one_warning_per_type(caplog: pytest.LogCaptureFixture) -> None:
    """P04."""
    with caplog.at_level(logging.WARNING, "envbus.codec"):
        to_plain([object(), object(), 1j])
        to_plain(object())
    assert [record.getMessage().split()[4] for record in caplog.records] == ["builtins.object", "builtins.complex"]


def test_values_that_contain_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """P04."""
    loop: dict[str, Any] = {"name": "loop"}
    loop["self"] = [loop]
    node = Node("n")
    node.next = node
    rows: list[Any] = []
    rows.append(rows)
    assert decode(encode(loop)) == {"name": "loop", "self": ["<recursion: dict>"]}
    assert to_plain(node) == {"name": "n", "next": "<recursion: Node>"}
    assert to_plain(rows) == ["<recursion: list>"]
    assert "contains itself" in caplog.text


def test_the_same_value_twice_is_no_cycle() -> None:
    shared = {"rows": [[1]]}
    assert to_plain([shared, shared]) == [shared, shared]


def test_depth_is_limited_with_the_path() -> None:
    limits = Limits(max_depth=3)
    assert to_plain({"a": [[1]]}, limits=limits) == {"a": [[1]]}
    with pytest.raises(EncodeError, match="deeper than 3") as caught:
        to_plain({"a": [0, [Node("x", 1)]]}, limits=limits)
    assert caught.value.path == "a[1][0]"


def test_endless_structures_are_refused_not_a_recursion_error() -> None:
    class Endless:
        def model_dump(self) -> Any:
            return Endless()

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value, limits in ((Endless(), Limits()), (deep, Limits(max_depth=10**6))):
        with pytest.raises(EncodeError, match="nested too deeply"):
            to_plain(value, limits=limits)
    while deep:  # taken apart by hand: the interpreter frees nested lists recursively
        deep = deep.pop()


def test_a_value_that_multiplies_is_refused() -> None:
    value: list[Any] = [1]
    for _ in range(40):
        value = [value, value]
    with pytest.raises(EncodeError, match="more than 10,000 containers"):
        to_plain(value, limits=Limits(max_nodes=10_000))


def test_containers_of_scalars_are_not_copied() -> None:
    """P34."""
    ids = list(range(10_000))
    row = {"a": 1}
    plain = to_plain({"ids": ids, "row": row})
    assert plain["ids"] is ids
    assert plain["row"] is row
