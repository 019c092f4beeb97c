"""A plain copy of a value that nothing can change any more, quick to make, to be packed later and elsewhere.

Invariant: what its owner does to the value afterwards does not show in the copy. Long lists of scalars are copied as
they are, and looked through only when they are packed: that takes ten times longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envbus.bus.extensions import PACKED_LIST_MIN, in_chunks
from envbus.bus.foreign import SCALARS
from envbus.bus.plain import DEFAULT_LIMITS, Limits, Walk, reading

LARGE_NODES = PACKED_LIST_MIN
"""A container with so much in it is packed piece by piece."""
SMALL_NODES = 2**14
SMALL_TEXT_BYTES = 2**18
SLICE_ITEMS = 2**18
"""Of a long list, copied at once: 1 ms."""
_SAMPLE_STEP = 64
_TEXT = frozenset({str, bytes})
_ARRAY_NODE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Frozen:
    """The copy.

    Attributes:
        tree: Plain data, with a LongList in place of each long list of scalars.
        large: Ids of its containers that are packed piece by piece.
        is_small: Packing it takes about a millisecond.
    """

    tree: Any
    large: set[int]
    long_lists: list[LongList]
    is_small: bool

    def part(self, tree: Any) -> Frozen:
        """Return one of its containers."""
        return Frozen(tree, self.large, self.long_lists, is_small=False)

    @property
    def list_items(self) -> int:
        """How many items its long lists have."""
        return sum(map(len, self.long_lists))

    def copy_lists(self) -> Iterator[int]:
        """Copy its long lists, slice by slice; yields the number of items of each."""
        for long_list in self.long_lists:
            yield from long_list.copy()

    def clear(self) -> None:
        """Empty its long lists, slice by slice: a million numbers that die at once stop every thread meanwhile."""
        for long_list in self.long_lists:
            long_list.clear()


class LongList:
    """A long list that looks like one of scalars only; the list itself until copy() has run."""

    __slots__ = ("_depth", "_limits", "_nodes", "_slices", "_source")

    def __init__(self, source: Sequence[Any], *, limits: Limits, nodes: int, depth: int) -> None:
        self._source = source
        self._slices: list[Sequence[Any]] = []
        self._limits = limits
        self._nodes = nodes
        self._depth = depth

    def __len__(self) -> int:
        return len(self._source) + sum(map(len, self._slices))

    def copy(self) -> Iterator[int]:
        """Copy it, slice by slice; yields the number of items of each."""
        source, self._source = self._source, ()
        for start in range(0, len(source), SLICE_ITEMS):
            self._slices.append(source[start : start + SLICE_ITEMS])
            yield len(self._slices[-1])

    def chunks(self) -> Iterator[Sequence[Any]]:
        """Return its items, some thousands at a time."""
        for part in self._slices:
            yield from in_chunks(part)

    def plain_chunks(self) -> Iterator[Sequence[Any]]:
        """Return its items as plain data: what else is between the scalars is converted now.

        Raises:
            EncodeError: As to_plain.
        """
        if all(SCALARS.issuperset(map(type, chunk)) for chunk in self.chunks()):
            return self.chunks()
        items = [item for part in self._slices for item in part]
        return in_chunks(reading(lambda: Walk(self._limits, self._nodes).rebuilt_list(items, self._depth)))

    def clear(self) -> None:
        """Empty it."""
        while self._slices:
            self._slices.pop()


def freeze(value: Any, *, limits: Limits = DEFAULT_LIMITS, copy_lists: bool = True) -> Frozen:
    """Return a copy of any value, as to_plain would make it.

    Takes about a microsecond for each container and 5 ns for each item of a long list.

    Args:
        value: Anything.
        limits: As for to_plain.
        copy_lists: False leaves its long lists to Frozen.copy_lists(); until then they must not change.

    Raises:
        EncodeError: As to_plain.
    """
    walk = _FreezingWalk(limits)
    tree = reading(lambda: walk.plain(value, 1))
    is_small = walk.weight < SMALL_NODES and walk.text_bytes < SMALL_TEXT_BYTES
    frozen = Frozen(tree, walk.large, walk.long_lists, is_small)
    if copy_lists:
        for _ in frozen.copy_lists():
            pass
    return frozen


class _FreezingWalk(Walk):
    """Copies what Walk would take over, and notes how much there is to pack."""

    __slots__ = ("large", "long_lists", "text_bytes", "weight")

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.large: set[int] = set()
        self.long_lists: list[LongList] = []
        self.weight = 0
        """Nodes, items of long lists, and words of arrays."""
        self.text_bytes = 0

    def _dict(self, source: dict[Any, Any], depth: int) -> Any:
        self._nodes += 1 + len(source)
        if depth > self._max_depth or self._nodes > self._max_nodes:
            raise self._over_limit(depth)
        before = self.weight
        self.weight = before + 1 + len(source)
        is_plain, text_bytes = True, 0
        for key, item in source.items():
            kind = type(item)
            if kind is str or kind is bytes:
                text_bytes += len(item)
            elif kind not in SCALARS:
                is_plain = False
            if type(key) is not str:
                is_plain = False
        self.text_bytes += text_bytes
        return self._weighed(source.copy() if is_plain else self.rebuilt_dict(source, depth), before)

    def _list(self, source: list[Any] | tuple[Any, ...], depth: int) -> Any:
        self._nodes += 1
        if depth > self._max_depth or self._nodes > self._max_nodes:
            raise self._over_limit(depth)
        before = self.weight
        self.weight = before + 1 + len(source)
        if len(source) >= PACKED_LIST_MIN and SCALARS.issuperset(map(type, source[::_SAMPLE_STEP])):
            return self._long_list(source, depth)
        kinds = set(map(type, source))
        if not kinds.isdisjoint(_TEXT):
            self.text_bytes += sum(len(item) for item in source if type(item) in _TEXT)
        return self._weighed(list(source) if kinds <= SCALARS else self.rebuilt_list(source, depth), before)

    def _long_list(self, source: list[Any] | tuple[Any, ...], depth: int) -> LongList:
        if type(source[0]) in _TEXT:
            self.text_bytes += sum(len(item) for item in source if type(item) in _TEXT)
        self.long_lists.append(LongList(source, limits=self._limits, nodes=self._nodes, depth=depth))
        return self.long_lists[-1]

    def _array(self, array: Any) -> Any:
        before = self.weight
        self.weight += 1 + array.nbytes // _ARRAY_NODE_BYTES
        return self._weighed(super()._array(array).copy(), before)

    def _weighed(self, result: Any, before: int) -> Any:
        if self.weight - before >= LARGE_NODES and type(result) is not str:  # a mark of recursion
            self.large.add(id(result))
        return result
