"""The dashboard's server: listens to the fleet, serves the page and its events. Lives on the caller's loop.

One connection to NATS, whatever the number of browsers; they get no credentials
and can send nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from importlib import resources
from typing import Self

from envbus.controller.fleet_views import PRESENT, ServerView
from envbus.controller.operator import Operator
from envbus.dashboard.document import document, encoded
from envbus.dashboard.history import History, Point
from envbus.errors import BusPermissionError, EnvbusError, NoServerError
from envbus.http_endpoint import EventStream, HttpEndpoint, Request, Response, Route, start_http_endpoint

log = logging.getLogger("envbus.dashboard")

TICK_S = 0.5
OVERDUE_S = 1.4
"""A server that is silent for longer is asked whether it is there: NATS says at once if it is not."""
ASK_TIMEOUT_S = 1.0
MAX_ASKED = 64
POINTS_EACH = 10
"""Points of the curves that every event repeats: a page may miss some events."""
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/rows.js": ("rows.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Dashboard:
    """Serves the page while it is entered.

    Args:
        operator: Connected; this takes its ``on_beat``.
        port: 0 takes a free one.
        host: Address to listen on.
    """

    def __init__(self, operator: Operator, *, port: int, host: str) -> None:
        self._operator = operator
        self._port = port
        self._host = host
        self._history = History()
        self._event = ""
        self._published = asyncio.Event()
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._may_ask = True
        self._files = {path: _file(*what) for path, what in _FILES.items()}

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            BusPermissionError: This user may not hear servers.
        """
        await self._operator.check_allowed()
        routes: dict[str, Route] = dict.fromkeys(self._files, self._serve_file)
        routes |= {"/events": self._events, "/livez": _livez, "/readyz": self._readyz}
        only_as = _LOOPBACK if self._host in _LOOPBACK else ()
        self._endpoint: HttpEndpoint = await start_http_endpoint(self._port, routes, host=self._host, only_as=only_as)
        self._operator.on_beat(lambda beat: self._history.beat(beat, time.time()))
        self._ticking = asyncio.create_task(self._tick_forever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._operator.on_beat(lambda beat: None)
        tasks = [self._ticking, *self._asked.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._endpoint.close()

    @property
    def url(self) -> str:
        """Where the page is."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::", "") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._endpoint.port}/"

    # ---- the fleet

    async def _tick_forever(self) -> None:
        while True:
            try:
                self._tick()
            except Exception:
                log.exception("the fleet could not be shown")
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        view = self._operator.view()
        if not view.cut_off:
            self._history.tick(view, time.time())
            for server in view.servers:
                self._ask_if_overdue(server)
        self._publish()

    def _publish(self) -> None:
        self._event = self._document(list(self._history.points)[-POINTS_EACH:])
        published, self._published = self._published, asyncio.Event()
        published.set()

    def _document(self, points: Iterable[Point]) -> str:
        operator = self._operator
        data = document(operator.view(), self._history, at=time.time(), points=points)
        return encoded({"bus": operator.options.describe(), "prefix": operator.prefix} | data)

    def _ask_if_overdue(self, server: ServerView) -> None:
        overdue = server.silent_s is not None and server.silent_s > OVERDUE_S and server.state in PRESENT
        if self._may_ask and overdue and server.server not in self._asked and len(self._asked) < MAX_ASKED:
            task = asyncio.create_task(self._ask(server))
            self._asked[server.server] = task
            task.add_done_callback(lambda _: self._asked.pop(server.server, None))

    async def _ask(self, server: ServerView) -> None:
        try:
            await self._operator.ping(server, timeout_s=ASK_TIMEOUT_S)
        except NoServerError:
            self._operator.fleet.server_gone(server.server, time.monotonic(), reason="its connection to NATS is gone")
            self._publish()
        except BusPermissionError as error:
            self._may_ask = False
            log.info("servers that are silent are not asked whether they are there: %s", error)
        except EnvbusError:
            pass  # it stalls: its silence is shown, and decides in the end

    # ---- pages

    def _serve_file(self, request: Request) -> Response:
        return self._files[request.path]

    def _events(self, request: Request) -> EventStream:
        return EventStream(self._follow())

    async def _follow(self) -> AsyncGenerator[str, None]:
        yield self._document(self._history.points)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._published.wait(), 10 * TICK_S)
            yield self._event

    def _readyz(self, request: Request) -> Response:
        cut_off = self._operator.view().cut_off
        return Response(b"cut off from NATS\n", 503) if cut_off else Response(b"ok\n")


def _livez(request: Request) -> Response:
    return Response(b"ok\n")


def _file(name: str, content_type: str) -> Response:
    body = (resources.files("envbus.dashboard") / "static" / name).read_bytes()
    return Response(body, content_type=content_type, headers=_HEADERS)
