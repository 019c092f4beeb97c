"""What a PromQL expression names: metrics and labels. Whether it is PromQL at all is promtool's business."""

from __future__ import annotations

import re

from envbus.server.metrics import controller_metrics, metrics_page, server_metrics

LABELS = frozenset(
    {"env", "server", "state", "outcome", "type", "le", "controller", "place"}
    | {"host", "version", "env_version", "fingerprint"}
    | {"instance", "job"}  # those that Prometheus adds
)
"""Every label that a series of a fleet has."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`')
_SELECTOR = re.compile(r"\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")
_NAME = re.compile(r"(?<![\w:.])[A-Za-z_:][\w:]*(?![\w:]*\s*\()")
_KEYWORDS = {"and", "or", "unless", "bool", "inf", "nan"}


def metrics_in(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    bare = _STRING.sub('""', expression)
    for part in (_SELECTOR, _GROUPING, _RANGE):
        bare = part.sub(" ", bare)
    return set(_NAME.findall(bare)) - _KEYWORDS


def labels_in(expression: str) -> set[str]:
    """The labels that an expression selects or groups by."""
    bare = _STRING.sub('""', expression)
    listed = _SELECTOR.findall(bare) + _GROUPING.findall(bare)
    return {name for names in listed for name in re.findall(r"[A-Za-z_]\w*", names)}


def served_metrics() -> set[str]:
    """The names of all series on a metrics page of a fleet."""
    body, _ = metrics_page(lambda: [*server_metrics([]), *controller_metrics([])])
    return series_of(body.decode())


def series_of(page: str) -> set[str]:
    """The names of all series of a metrics page, also of those that have no value yet."""
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE):
        names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    return names
