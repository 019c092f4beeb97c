"""Connections of model requests: a name is resolved here, and only addresses that were checked are connected to.

So a name that leads to an innocent address at first, and to another one later (DNS rebinding), gains nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from envbus.errors import ModelAddressError
from envbus.model_urls import is_address, is_reserved

log = logging.getLogger(__name__)


class CheckedBackend:
    """A network backend of the HTTP library, in place of the one that it wraps.

    Args:
        backend: Connects, to addresses.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._library = sys.modules[type(backend).__module__.partition(".")[0]]

    async def connect_tcp(self, host: str, port: int, timeout: float | None = None, **settings: Any) -> Any:
        """Connect to the first address of a host that takes it.

        Raises:
            ModelAddressError: One of them is link-local or a metadata service.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        addresses = [host] if is_address(host) else await self._resolved(host, port, timeout)
        if any(map(is_reserved, addresses)):
            log.warning("the model host %s resolves to %s: not called", host, ", ".join(addresses))
            raise ModelAddressError(f"{host} leads to a link-local or metadata address: no model is ever called there")
        for position, address in enumerate(addresses):
            left = len(addresses) - position
            limit_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) / left
            try:
                return await self._backend.connect_tcp(address, port, timeout=limit_s, **settings)
            except (self._library.ConnectError, self._library.ConnectTimeout):
                if left == 1:
                    raise
        raise self._library.ConnectError(f"{host} has no address")

    async def connect_unix_socket(self, *arguments: Any, **settings: Any) -> Any:
        """No model is there."""
        raise ModelAddressError("models are not called by a socket's path")

    async def sleep(self, seconds: float) -> None:
        """As the library's own."""
        await self._backend.sleep(seconds)

    async def _resolved(self, host: str, port: int, timeout: float | None) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            raise self._library.ConnectTimeout(f"{host} was not resolved in time") from error
        except (OSError, UnicodeError) as error:
            raise self._library.ConnectError(str(error)) from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
