"""Numbers and names as text (pure)."""

from __future__ import annotations

from collections.abc import Mapping


def number(value: float | None) -> str:
    """Three decimals, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 05 s`` or ``2 h 10 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plural(count: int, noun: str) -> str:
    """``1 rollout``, ``3 rollouts``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def failures(errors_by_type: Mapping[str, int]) -> str:
    """``ModelError 3, ToolError 1``."""
    return ", ".join(f"{name} {count}" for name, count in errors_by_type.items())


def shortened(text: str, max_chars: int) -> str:
    """The text on one line, cut if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
