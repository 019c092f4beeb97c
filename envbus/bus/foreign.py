"""One step from a value of any kind towards what msgpack carries: the fate of each kind.

Owns the rules for kinds (docs/protocol.md, "Values"); never raises, whatever the value's own code does.
Does not recurse: the walk over containers is in plain.py.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import BaseModel

logger = logging.getLogger("envbus.codec")

SCALARS = frozenset({type(None), bool, int, float, str, bytes})
"""Exact types that msgpack carries as they are."""

_BITS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
ARRAY_DTYPES = frozenset({"bool"} | {f"{kind}{bits}" for kind, sizes in _BITS.items() for bits in sizes})
"""numpy's names of the dtypes that stay arrays on the wire; others become nested lists."""

MAX_ARRAY_DIMS = 32
MAX_EMPTY_EXTENT = 2**24
"""Bound on the other dimensions of an array without elements: it costs no bytes, but its nested lists would."""

_MAX_TEXT_CHARS = 2_000


def simplify(value: Any) -> Any:
    """Return ``value`` one step nearer to plain data: a scalar, a list, a dict, an array or a value to simplify again.

    A kind without a rule becomes bounded text, with one warning per type.
    """
    try:
        for kinds, convert in _RULES:
            if isinstance(value, kinds):
                return convert(value)
        return _by_protocol(value)
    except Exception as exc:  # noqa: BLE001 - properties and dumps of the environment's own classes run here
        _warn_once(type_name(value), f"could not be converted ({type(exc).__name__}); it is sent as text")
        return text(value)


def is_plain_array(value: Any) -> bool:
    """Whether ``value`` is a numpy array as `simplify` leaves it: little-endian, contiguous, a listed dtype."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.name not in ARRAY_DTYPES:
        return False
    return bool(value.flags.c_contiguous and value.dtype == value.dtype.newbyteorder("<") and _is_sensible(value))


def plain_key(key: Any) -> str:
    """Return a dict key as JSON would write it: ``1`` → ``"1"``, ``True`` → ``"true"``, ``None`` → ``"null"``."""
    try:
        key = _unwrapped(key)
        if isinstance(key, str):
            return str.__str__(key)
        if key is None or isinstance(key, int | float):
            return json.dumps(key)
        if isinstance(key, bytes):
            return key.decode()
    except Exception:  # noqa: BLE001 - keys of the environment's own classes
        return text(key)
    return text(key)


def recursion_mark(value: Any) -> str:
    """Return the text that stands for a container inside itself."""
    _warn_once(type_name(value), "contains itself; the inner reference is sent as text")
    return f"<recursion: {type(value).__name__}>"


def text(value: Any, render: Callable[[Any], str] = str) -> str:
    """Return ``render(value)``, bounded, or ``<Class: unprintable>`` when it raises."""
    try:
        rendered = str.__str__(render(value))
    except Exception:  # noqa: BLE001 - __str__ and __repr__ of the environment's own classes
        return f"<{type(value).__name__}: unprintable>"
    return rendered if len(rendered) <= _MAX_TEXT_CHARS else rendered[:_MAX_TEXT_CHARS] + "…"


def type_name(value: Any) -> str:
    """Return the qualified name of the value's type."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _by_protocol(value: Any) -> Any:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _array(value, numpy)
    if numpy is not None and isinstance(value, numpy.generic):
        return _numpy_scalar(value)
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor(value, torch)
    if callable(getattr(type(value), "model_dump", None)):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    _warn_once(type_name(value), "has no form on the wire; it is sent as text")
    return text(value)


def _array(array: Any, numpy: Any) -> Any:
    if array.dtype.name not in ARRAY_DTYPES or isinstance(array, numpy.ma.MaskedArray):
        return array.tolist()
    if not _is_sensible(array):
        return text(array)
    return array.astype(array.dtype.newbyteorder("<"), order="C", copy=False, subok=False)


def _is_sensible(array: Any) -> bool:
    extent = math.prod(dim or 1 for dim in array.shape)
    return bool(array.ndim <= MAX_ARRAY_DIMS and extent <= max(array.size, MAX_EMPTY_EXTENT))


def _numpy_scalar(scalar: Any) -> Any:
    item = scalar.item()
    return float(item) if type(item) is type(scalar) else item  # longdouble's item() is itself


def _tensor(tensor: Any, torch: Any) -> Any:
    if tensor.dtype is torch.bfloat16:  # numpy has no bfloat16; float32 holds every value of it
        tensor = tensor.detach().float()
    return tensor.detach().cpu().numpy()


def _dumped(model: BaseModel) -> Any:
    try:
        return model.model_dump(warnings=False)
    except TypeError:  # a class's own model_dump without that parameter
        return model.model_dump()


def _unwrapped(key: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if isinstance(key, Enum):
        return key.value
    return key.item() if numpy is not None and isinstance(key, numpy.generic) else key


def _ordered(items: set[Any] | frozenset[Any]) -> list[Any]:
    try:
        return sorted(items)
    except TypeError:
        return list(items)


@lru_cache(maxsize=1024)
def _warn_once(kind: str, what: str) -> None:
    logger.warning("a value of type %s %s", kind, what)


_RULES: tuple[tuple[type[Any] | tuple[type[Any], ...], Callable[[Any], Any]], ...] = (
    (Enum, lambda value: value.value),
    # the base classes' own methods: a subclass's overrides may do anything
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    ((bytes, bytearray, memoryview), bytes),
    ((list, tuple, deque), list),
    ((set, frozenset), _ordered),
    (BaseModel, _dumped),
    (Mapping, dict),
    ((datetime, date, time), lambda value: value.isoformat()),
    (PurePath, PurePath.as_posix),
    ((Decimal, UUID), str),
    (BaseException, lambda value: text(value, repr)),
)
