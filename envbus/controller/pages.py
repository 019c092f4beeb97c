"""A controller's pages over HTTP: /metrics of the whole fleet, /livez, /readyz. On the loop of its connection.

Keeps the latest heartbeat of every server and controller, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from envbus.bus.connection import Connection
from envbus.bus.control_messages import ControllerBeat
from envbus.bus.messages import Beat, WireMessage, parse
from envbus.bus.subjects import all_beats, all_controller_beats, controller_beat, parse_beat
from envbus.errors import EnvbusError
from envbus.http_endpoint import HttpEndpoint, Request, Response, start_http_endpoint

STALE_S = 10.0
"""A server or controller that is silent for longer is left out of the metrics."""
MAX_HEARD = 10_000


class FleetPages:
    """Answers probes of one controller and exposes the fleet that its connection hears.

    Args:
        connection: Open or not yet.
        prefix: First token of all subjects.
        not_ready: Says why the controller is not ready, e.g. that it drains; None if it is.
    """

    def __init__(
        self, connection: Connection, prefix: str, *, not_ready: Callable[[], str | None] = lambda: None
    ) -> None:
        self._connection = connection
        self._prefix = prefix
        self._not_ready = not_ready
        self._heard: dict[str, tuple[float, Beat | ControllerBeat]] = {}
        self._subscriptions: list[Any] = []
        self._endpoint: HttpEndpoint | None = None

    async def open(self, port: int, *, host: str = "0.0.0.0") -> int:
        """Listen on the bus and on a port (0: a free one); the port.

        Raises:
            UsageError: The address cannot be listened on.
        """
        routes = {"/metrics": self.metrics, "/livez": livez, "/readyz": self.readyz}
        self._endpoint = await start_http_endpoint(port, routes, host=host)
        await self.listen()
        return self._endpoint.port

    @property
    def port(self) -> int:
        """The port of the pages."""
        assert self._endpoint is not None
        return self._endpoint.port

    async def listen(self) -> None:
        """Listen on the bus only; for an endpoint of somebody else that has these pages among its routes."""
        self._subscriptions = [
            await self._connection.subscribe(subject, self._on_beat)
            for subject in (all_beats(self._prefix), all_controller_beats(self._prefix))
        ]

    async def close(self) -> None:
        """Listen no more."""
        if self._endpoint is not None:
            await self._endpoint.close()
        for subscription in self._subscriptions:
            await self._connection.leave(subscription)

    def _on_beat(self, message: Any) -> None:
        try:
            heard = parse(message.data)
        except EnvbusError:
            return
        if self._may_say(message.subject, heard) and (message.subject in self._heard or len(self._heard) < MAX_HEARD):
            assert isinstance(heard, Beat | ControllerBeat)
            self._heard[message.subject] = time.monotonic(), heard

    def _may_say(self, subject: str, heard: WireMessage) -> bool:
        """NATS checks who may publish where, so a heartbeat counts only on its own subject."""
        match heard:
            case Beat():
                return parse_beat(subject, self._prefix) == (heard.env, heard.server)
            case ControllerBeat():
                return subject == controller_beat(heard.controller, self._prefix)
        return False

    def metrics(self, request: Request) -> Response:
        """Route: the fleet in Prometheus text."""
        from envbus.server.metrics import controller_metrics, metrics_page, server_metrics

        oldest = time.monotonic() - STALE_S
        self._heard = {subject: known for subject, known in self._heard.items() if known[0] >= oldest}
        heard = [beat for _, beat in self._heard.values()]
        servers = [beat for beat in heard if isinstance(beat, Beat)]
        controllers = [beat for beat in heard if isinstance(beat, ControllerBeat)]
        body, content_type = metrics_page(
            lambda: [*server_metrics(servers), *controller_metrics(controllers)],
            accept=request.headers.get("accept", ""),
        )
        return Response(body, content_type=content_type)

    def readyz(self, request: Request) -> Response:
        """Route: 200, or 503 and why."""
        reason = self._not_ready() if self._connection.is_up else "cut off from NATS"
        return Response(b"ok\n") if reason is None else Response(f"{reason}\n".encode(), 503)


def livez(request: Request) -> Response:
    """Route: this loop turns."""
    return Response(b"ok\n")
