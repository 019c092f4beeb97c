"""Brings what a heartbeat says within reason (pure): it is a stranger's word, and it is added up and shown."""

from __future__ import annotations

import math
from typing import Any

from envbus.bus.messages import Beat

MAX_TEXT = 4000
MAX_HOST = 64
_MAX_SECONDS = 1e10
"""Beyond every clock of today."""
_MAX_COUNT = 10**15


def sane_beat(beat: Beat) -> Beat:
    """The beat with numbers that can be added up and shown, and texts of bounded length."""
    changed: dict[str, Any] = {}
    for name, value in beat.__dict__.items():
        if isinstance(value, float):
            changed[name] = min(max(value, 0.0), _MAX_SECONDS) if math.isfinite(value) else 0.0
        elif isinstance(value, int):
            changed[name] = min(max(value, 0), _MAX_COUNT)
        elif isinstance(value, str):
            changed[name] = value[:MAX_TEXT]
    changed |= {"host": beat.host[:MAX_HOST]}
    if beat.sent_at is not None and not 0 <= beat.sent_at <= _MAX_SECONDS:
        changed["sent_at"] = None
    return beat.model_copy(update=changed)
