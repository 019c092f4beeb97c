"""Values are frozen at once and packed later: what their owner does meanwhile does not show (P34)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from envbus.bus.codec import Limits, decode, encode, encode_frozen, freeze, to_plain
from envbus.bus.frozen import LongList
from envbus.errors import EncodeError

LONG = 5_000


def value() -> dict[str, Any]:
    return {
        "flat": {"a": 1},
        "rows": [{"n": [1, 2]}, {}],
        "scalars": [1, "a"],
        "ids": list(range(LONG)),
        "odd": [0] * LONG + [{"deep": [1]}],
        "array": np.zeros(3),
        "large_array": np.zeros(50_000),
    }


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda v: v["flat"].update(a=2, b=3),
    "a dict in a list": lambda v: v["rows"][0].update(n=0),
    "a list deep inside": lambda v: v["rows"][0]["n"].append(3),
    "a list of scalars": lambda v: v["scalars"].clear(),
    "a long list": lambda v: v["ids"].__setitem__(7, -1),
    "a long list's length": lambda v: v["ids"].append(1),
    "an array in place": lambda v: v["array"].fill(1),
    "a large array in place": lambda v: v["large_array"].fill(1),
    "the whole": lambda v: v.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_after_freezing_does_not_show(change: Callable[[Any], Any]) -> None:
    source = value()
    before = encode(source)
    frozen = freeze(source)
    change(source)
    assert encode_frozen(frozen) == before


def test_a_frozen_value_is_packed_as_to_plain_has_it() -> None:
    odd = {"odd": [0.5] * LONG + [{(1, 2): {3}}, 2**70, None], "text": ["a"] * LONG, "tuple": (1,) * LONG}
    assert decode(encode_frozen(freeze(odd))) == to_plain(odd)


def test_packing_in_pieces_gives_the_bytes_of_one_call() -> None:
    rows = {"rows": [{"role": "user", "n": n, "text": "é", "tags": ["a", None, 0.5]} for n in range(3_000)]}
    assert freeze(rows).large
    assert encode(rows) == msgpack.packb(rows)
    array = np.arange(400_000, dtype=np.int64).reshape(2, -1)
    assert freeze([array]).large
    assert np.array_equal(decode(encode([array]))[0], array)


def test_lists_may_be_copied_later() -> None:
    frozen = freeze({"ids": [1.5] * LONG, "x": 1}, copy_lists=False)
    assert type(frozen.tree["ids"]) is LongList
    assert list(frozen.copy_lists()) == [LONG]
    assert decode(encode_frozen(frozen)) == {"ids": [1.5] * LONG, "x": 1}
    frozen.clear()
    assert len(frozen.tree["ids"]) == 0


def test_what_is_hidden_in_a_long_list_is_refused_when_it_is_packed() -> None:
    deep: Any = [0] * LONG + [[[[1]]]]
    limits = Limits(max_depth=3)
    frozen = freeze(deep, limits=limits)
    with pytest.raises(EncodeError, match="deeper than 3"):
        encode_frozen(frozen, limits=limits)


def test_an_integer_that_is_too_long_is_found_in_a_long_list() -> None:
    with pytest.raises(EncodeError, match="integer") as caught:
        encode({"ids": [1] * LONG + [2**9000]})
    assert caught.value.path == f"ids[{LONG}]"


@pytest.mark.parametrize(
    ("small", "item"),
    [
        (True, {"a": 1}),
        (True, [0] * 10_000),
        (False, [0] * 20_000),
        (False, "x" * 300_000),
        (False, [b"x" * 99] * 9_999),
    ],
    ids=["dict", "10,000 numbers", "20,000 numbers", "text", "many texts"],
)
def test_what_counts_as_small(small: bool, item: Any) -> None:
    assert freeze({"item": item}).is_small is small


def test_a_long_list_in_itself_ends() -> None:
    loop: list[Any] = [1] * LONG
    loop.append(loop)
    rows: list[Any] = [{}] * LONG
    rows.append(rows)
    assert "recursion" in str(decode(encode({"loop": loop}))["loop"][-1])
    assert "recursion" in decode(encode({"rows": rows}))["rows"][-1]
