"""Results as strict JSON text that reads back as the same values (pure).

Non-finite floats become ``{"$float": "nan" | "inf" | "-inf"}``, bytes ``{"$bytes": base64}``; in a dict whose only
key starts with ``$`` that ``$`` is doubled. An object without a JSON form becomes ``{"$repr": text}`` and
stays so when read. Arrays, tuples and sets become lists; keys become strings.
"""

from __future__ import annotations

import base64
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from envbus.errors import EncodeError

_MAX_REPR_CHARS = 2000
_MAX_DEPTH = 200


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Encode as ASCII JSON text without NaN or Infinity.

    Raises:
        EncodeError: The value contains itself, is nested too deeply, or holds an integer of thousands of digits.
    """
    try:
        text = json.dumps(value, allow_nan=False, default=_plain_object, indent=indent)
        if '"$' not in text:
            return text
    except (ValueError, TypeError, RecursionError):
        pass  # not plain JSON: the careful way below names what is wrong
    try:
        return json.dumps(_tagged(value, 0), allow_nan=False, indent=indent)
    except (ValueError, TypeError, RecursionError) as exc:
        raise EncodeError(f"cannot be written as JSON: {exc}") from exc


def loads(text: str | bytes) -> Any:
    """Decode what ``dumps`` wrote.

    Raises:
        ValueError: The text is not JSON.
    """
    return json.loads(text, object_hook=_untag)


def _plain_object(value: Any) -> Any:
    """Give an object that has a plain JSON form that form; used by the fast path only."""
    simple = _simplified(value)
    if simple is value:
        raise TypeError(type(value).__name__)
    return simple


def _tagged(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise EncodeError("contains itself or is nested too deeply to be saved")
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return _tagged_mapping(value, depth)
    if isinstance(value, list | tuple):
        return [_tagged(item, depth + 1) for item in value]
    simple = _simplified(value)
    return {"$repr": _safe_repr(value)} if simple is value else _tagged(simple, depth + 1)


def _tagged_mapping(value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    tagged = {_key(key): _tagged(item, depth + 1) for key, item in value.items()}
    if len(tagged) == 1 and (key := next(iter(tagged))).startswith("$"):
        return {f"${key}": tagged[key]}
    return tagged


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else _safe_repr(key)


def _simplified(value: Any) -> Any:
    """One step towards JSON; the value itself when there is none."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=_safe_repr)
    tolist = getattr(value, "tolist", None)  # numpy arrays and scalars, torch tensors
    return tolist() if callable(tolist) else value


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)[:_MAX_REPR_CHARS]
    except Exception:  # noqa: BLE001 - the repr of a user's object may raise anything
        return f"<{type(value).__name__} whose repr raises>"


def _untag(obj: dict[str, Any]) -> Any:
    if len(obj) != 1:
        return obj
    ((tag, value),) = obj.items()
    if tag == "$float":
        return float(value)
    if tag == "$bytes":
        return base64.b64decode(value)
    return {tag[1:]: value} if tag.startswith("$$") else obj
