"""A listener that should hear nothing: it counts connections, and keeps the first bytes of each."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Listener:
    """Counts who connects to a port of a loopback address."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.heard: list[bytes] = []
        self._socket = socket.create_server((address, 0))
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._listen)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Listener]:
        self._thread.start()
        try:
            yield self
        finally:
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(10)
            self._socket.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # it was shut down
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(1)
                    self.heard.append(b"")
                    with contextlib.suppress(TimeoutError):
                        self.heard[-1] = connection.recv(4096)
