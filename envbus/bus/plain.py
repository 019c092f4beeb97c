"""The walk that turns whatever an environment returns into plain data: what msgpack carries, and numpy arrays.

Local runs go through it too, so that local and remote results agree. A container of plain scalars is returned
as it is, not copied. What becomes of each kind is in foreign.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from envbus.bus.foreign import SCALARS, is_plain_array, plain_key, recursion_mark, simplify
from envbus.errors import EncodeError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one message, checked before its content is used."""

    max_bytes: int = 512 * 2**20
    """Encoded size."""
    max_depth: int = 64
    """Containers inside one another; the outermost is 1."""
    max_nodes: int = 2**23
    """Containers, arrays and map entries together. Scalars in lists are bounded by ``max_bytes`` alone."""


DEFAULT_LIMITS = Limits()
"""For bodies: rollouts, groups, pages of examples."""
CONTROL_LIMITS = Limits(max_bytes=2**20, max_depth=16, max_nodes=2**16)
"""For everything else: requests, acknowledgements, beats."""

_STR = frozenset({str})

T = TypeVar("T")


def to_plain(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Return ``value`` as None, bool, int, float, str, bytes, list, dict with str keys, or numpy array.

    Args:
        value: Anything. A kind that has no plain form becomes text, with one warning per type.
        limits: Depth and node count are checked here.

    Raises:
        EncodeError: Too deep, too many nodes, or two keys of a dict that become the same string.
    """
    return reading(lambda: Walk(limits).plain(value, 1))


def reading(walk: Callable[[], T]) -> T:
    """Return what a walk returns.

    Raises:
        EncodeError: What it met is refused.
    """
    try:
        return walk()
    except _RefusedError as refused:
        raise EncodeError(refused.reason, path=join_path(reversed(refused.path))) from None
    except RecursionError:
        raise EncodeError("nested too deeply for this process's stack") from None
    except RuntimeError as exc:
        raise EncodeError(f"changed while it was read ({exc})") from exc


def join_path(keys: Iterable[str | int]) -> str:
    """Return keys and indices as ``info.rows[3]['a b']``."""
    path = ""
    for key in keys:
        if isinstance(key, str) and key.isidentifier():
            path += f".{key}" if path else key
        else:
            path += f"[{key!r}]" if len(str(key)) <= 100 else "[…]"
    return path


class _RefusedError(Exception):
    """Carries the reason up; every level adds its key, so that a walk without error never builds a path."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.path: list[str | int] = []
        super().__init__(reason)


class Walk:
    """One walk over one value.

    Args:
        nodes: How many were counted elsewhere.
    """

    __slots__ = ("_active", "_limits", "_max_depth", "_max_nodes", "_nodes")

    def __init__(self, limits: Limits, nodes: int = 0) -> None:
        self._limits = limits
        self._max_depth = limits.max_depth
        self._max_nodes = limits.max_nodes
        self._nodes = nodes
        self._active: set[int] = set()
        """Ids of the containers around the current value; they are alive, so ids are unique."""

    def plain(self, value: Any, depth: int) -> Any:
        """Return the plain form of a value that lies so deep."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is dict:
            return self._dict(value, depth)
        if kind is list or kind is tuple:
            return self._list(value, depth)
        return self._foreign(value, depth)

    def _dict(self, source: dict[Any, Any], depth: int) -> Any:
        self._nodes += 1 + len(source)
        if depth > self._max_depth or self._nodes > self._max_nodes:
            raise self._over_limit(depth)
        for key, item in source.items():
            if type(key) is not str or type(item) not in SCALARS:
                return self.rebuilt_dict(source, depth)
        return source

    def _list(self, source: list[Any] | tuple[Any, ...], depth: int) -> Any:
        self._nodes += 1
        if depth > self._max_depth or self._nodes > self._max_nodes:
            raise self._over_limit(depth)
        if SCALARS.issuperset(map(type, source)):
            return source if type(source) is list else list(source)
        return self.rebuilt_list(source, depth)

    def rebuilt_dict(self, source: dict[Any, Any], depth: int) -> Any:
        """Return the plain form of a dict that is not one of scalars under strings only."""
        if id(source) in self._active:
            return recursion_mark(source)
        self._active.add(id(source))
        named = source if _STR.issuperset(map(type, source)) else _with_plain_keys(source)
        result = named.copy()
        name = ""
        try:
            for name, item in named.items():
                if type(item) not in SCALARS:
                    result[name] = self.plain(item, depth + 1)
        except _RefusedError as refused:
            refused.path.append(name)
            raise
        self._active.discard(id(source))
        return result

    def rebuilt_list(self, source: list[Any] | tuple[Any, ...], depth: int) -> Any:
        """Return the plain form of a list that is not one of scalars only."""
        if id(source) in self._active:
            return recursion_mark(source)
        self._active.add(id(source))
        result: list[Any] = []
        try:
            for item in source:
                result.append(item if type(item) in SCALARS else self.plain(item, depth + 1))
        except _RefusedError as refused:
            refused.path.append(len(result))
            raise
        self._active.discard(id(source))
        return result

    def _foreign(self, source: Any, depth: int) -> Any:
        if id(source) in self._active:
            return recursion_mark(source)
        self._active.add(id(source))
        nearer = simplify(source)
        result = self._array(nearer) if is_plain_array(nearer) else self.plain(nearer, depth)
        self._active.discard(id(source))
        return result

    def _array(self, array: Any) -> Any:
        self._nodes += 1
        if self._nodes > self._max_nodes:
            raise self._over_limit(0)
        return array

    def _over_limit(self, depth: int) -> Exception:
        if depth > self._max_depth:
            return _RefusedError(f"nested deeper than {self._max_depth} levels")
        return _RefusedError(f"more than {self._max_nodes:,} containers and keys in one message")


def _with_plain_keys(source: dict[Any, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in source.items():
        name = plain_key(key)
        if name in result:
            raise _RefusedError(f"two keys of the dict become the same string {name[:100]!r}")
        result[name] = item
    return result
