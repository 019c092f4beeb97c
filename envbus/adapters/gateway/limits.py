"""Sizes and times of a gateway, each with its default and unit."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Limits of each listener."""

    max_clients: int = 1024
    """Connections that have requests; a request of one more is refused."""
    max_requests: int = 100_000
    """Requests of one client that are not answered; one more is refused."""
    max_request_bytes: int = 256 * MIB
    """A larger request is refused. A frame of twice this size ends the connection that it comes on."""
    max_held_bytes: int = 2 * GIB
    """Size of all requests that are not answered; what comes beyond is refused."""
    max_unread_bytes: int = 512 * MIB
    """Answers that one client has not read; a client with more is taken as gone."""
    probe_interval_s: float = 1.0
    """How often it is seen whether clients with requests are still connected."""
    silence_s: float = 60.0
    """A host that gives no sign for this long (its heartbeats are ZeroMQ's own) is taken as gone."""
    idle_s: float = 60.0
    """A client without requests leaves the bus after this time; its next request brings it back."""
