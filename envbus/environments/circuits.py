"""Which of several endpoints are left out after failures, and when one of them is tried again.

Pure: outcomes and a clock value in, decisions out. Holds only endpoints that failed lately, a bounded number of them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

FAILURES_TO_OPEN = 3
"""Failures in a row, connection failures and 5xx, after which an endpoint is left out."""
PAUSE_S = 10.0
"""How long it is left out before one call tries it again."""
MAX_ENDPOINTS = 1024


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    retry_at_s: float | None = None
    """None while it takes every call."""


class Circuits:
    """The endpoints that failed lately.

    Args:
        failures_to_open: Failures in a row after which an endpoint is left out.
        pause_s: How long before one call probes it.
        max_endpoints: Past this many the one that failed longest ago is forgotten.
    """

    def __init__(
        self,
        *,
        failures_to_open: int = FAILURES_TO_OPEN,
        pause_s: float = PAUSE_S,
        max_endpoints: int = MAX_ENDPOINTS,
    ) -> None:
        self._failures_to_open = failures_to_open
        self._pause_s = pause_s
        self._max_endpoints = max_endpoints
        self._circuits: OrderedDict[str, _Circuit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._circuits)

    def is_closed(self, endpoint: str) -> bool:
        """Whether an endpoint takes every call."""
        circuit = self._circuits.get(endpoint)
        return circuit is None or circuit.retry_at_s is None

    def is_due(self, endpoint: str, now_s: float) -> bool:
        """Whether an endpoint takes a call now: every call, or the one that probes it."""
        circuit = self._circuits.get(endpoint)
        return circuit is None or circuit.retry_at_s is None or now_s >= circuit.retry_at_s

    def enter(self, endpoint: str, now_s: float) -> bool:
        """Whether this call may go to the endpoint; a probe keeps others away for another pause."""
        if not self.is_due(endpoint, now_s):
            return False
        if not self.is_closed(endpoint):
            self._circuits[endpoint].retry_at_s = now_s + self._pause_s
        return True

    def answered(self, endpoint: str) -> bool:
        """Note that it answered; True if it was left out until now."""
        circuit = self._circuits.pop(endpoint, None)
        return circuit is not None and circuit.retry_at_s is not None

    def failed(self, endpoint: str, now_s: float) -> bool:
        """Note that it failed; True if it is left out from now on."""
        circuit = self._circuits.setdefault(endpoint, _Circuit())
        self._circuits.move_to_end(endpoint)
        if len(self._circuits) > self._max_endpoints:
            self._circuits.popitem(last=False)
        circuit.failures += 1
        if circuit.failures < self._failures_to_open:
            return False
        was_closed = circuit.retry_at_s is None
        circuit.retry_at_s = now_s + self._pause_s
        return was_closed
