"""A server's pages over HTTP: /metrics, /livez, /readyz. On the bus thread: an environment that blocks delays none."""

from __future__ import annotations

from collections.abc import Callable

from envbus.bus.connection import Connection
from envbus.bus.messages import Beat
from envbus.http_endpoint import HttpEndpoint, Request, Response, start_http_endpoint


class Pages:
    """Answers probes from the start, also before NATS is reached.

    Attributes:
        beat: Gives the server's state as of now, once it has one.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._endpoint: HttpEndpoint | None = None
        self.beat: Callable[[], Beat] | None = None

    async def open(self, port: int, host: str) -> int:
        """Listen; the port that it listens on.

        Raises:
            UsageError: The address cannot be listened on.
        """
        routes = {"/metrics": self._metrics, "/livez": self._livez, "/readyz": self._readyz}
        self._endpoint = await start_http_endpoint(port, routes, host=host)
        return self._endpoint.port

    async def close(self) -> None:
        """Stop listening."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def _metrics(self, request: Request) -> Response:
        from envbus.server.metrics import metrics_page, server_metrics  # prometheus only where it is asked for

        beats = [self.beat()] if self.beat is not None else []
        body, content_type = metrics_page(lambda: server_metrics(beats), accept=request.headers.get("accept", ""))
        return Response(body, content_type=content_type)

    def _livez(self, request: Request) -> Response:
        return Response(b"ok\n")

    def _readyz(self, request: Request) -> Response:
        reason = self._not_ready()
        return Response(b"ok\n") if reason is None else Response(f"{reason}\n".encode(), 503)

    def _not_ready(self) -> str | None:
        if not self._connection.is_up:
            return "cut off from NATS"
        state = self.beat().state if self.beat is not None else "loading"
        return None if state in ("ready", "full") else state
