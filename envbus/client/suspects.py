"""Whether a server that NATS does not know (503) is gone, or is about to be back on another connection or route.

Pure: events and a clock value in, answers out. A 503 says that no connection of the
server can be reached now. It stays one for good when the server died; it passes when
the server's connection, its NATS server, or the way there was cut and is made anew.
"""

from __future__ import annotations

from collections.abc import Iterable

CONFIRM_S = 0.4
"""A server whose NATS server is reached connects again sooner than this."""
RETURN_S = 3.0
"""So long a server may need whose NATS server died, or cannot be reached: it goes to another one."""


class Suspects:
    """The servers of one client's jobs, and the NATS servers (nodes) that they are connected to."""

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}
        self._since: dict[str, float] = {}
        """Servers that only 503s came from, with the time of the first."""
        self._reached: dict[str, float] = {}
        """When a server last answered from a node."""
        self._ended: set[str] = set()
        self._deaf_until = 0.0

    def servers(self) -> frozenset[str]:
        """Those under suspicion: to be asked in short intervals."""
        return frozenset(self._since)

    def heard(self, server: str, node: str | None, now: float) -> None:
        """A server said something, from this node."""
        self._since.pop(server, None)
        self._ended.discard(server)
        if node is not None:
            self._nodes[server] = node
            self._reached[node] = now

    def ended(self, server: str) -> None:
        """Its controller saw its process end."""
        self._ended.add(server)

    def nobody(self, server: str, *, own_node: str | None, now: float) -> bool:
        """A 503 for a server. Returns whether that makes sure that it is gone."""
        if server in self._ended:
            return True
        if now < self._deaf_until:
            return False
        since = self._since.setdefault(server, now)
        node = self._nodes.get(server)
        is_reached = node is not None and (node == own_node or self._reached.get(node, since) > since)
        return now - since >= (CONFIRM_S if is_reached else RETURN_S)

    def reconnected(self, *, deaf_until: float) -> None:
        """This client was cut off itself: until then a 503 says no more than that a server is not back yet."""
        self._since.clear()
        self._deaf_until = deaf_until

    def keep_only(self, servers: Iterable[str]) -> None:
        """Forget all others: nothing of this client's is there any more."""
        kept = set(servers)
        self._nodes = {server: node for server, node in self._nodes.items() if server in kept}
        self._since = {server: since for server, since in self._since.items() if server in kept}
        nodes = set(self._nodes.values())
        self._reached = {node: at for node, at in self._reached.items() if node in nodes}
        self._ended &= kept
