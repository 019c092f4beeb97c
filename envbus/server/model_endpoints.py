"""Which API keys a server may use and where; makes the model clients of its rollouts.

A request names a key's environment variable and a base URL. A key goes only
to an origin that the operator allowed for it. Unset, unknown and mismatched
get the same refusal, so that a client learns nothing about the environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from envbus.environments.model_client import NO_KEY, ModelClients
from envbus.errors import ModelKeyError, UsageError
from envbus.types import ClientConfig, EndpointConfig

ANY_KEY = "*"


class KeyPolicy:
    """Pairs of a key's variable and the origin it may be sent to.

    Args:
        allowed: Entries ``"VARIABLE=ORIGIN"``, e.g. ``"OPENAI_API_KEY=https://api.openai.com"``; ``"*"`` allows
            every key everywhere: only for a server that nobody but its own user can reach.

    Raises:
        UsageError: An entry is not of that form.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        entries = set(allowed)
        self._allows_all = ANY_KEY in entries
        self._pairs: set[tuple[str, str]] = set()
        for entry in sorted(entries - {ANY_KEY}):
            variable, equals, url = entry.partition("=")
            if not variable or not equals or not urlsplit(url).hostname:
                raise UsageError(f"--allow-key {entry!r}: write VARIABLE=https://host")
            self._pairs.add((variable, origin(url)))

    def key(self, endpoint: EndpointConfig) -> str:
        """Return the key for an endpoint.

        Raises:
            ModelKeyError: The pair is not allowed, or the variable is not set.
        """
        variable = endpoint.api_key_var
        if variable is None:
            return NO_KEY
        value = os.environ.get(variable, "")
        where = origin(endpoint.api_base_url)
        if not value or not (self._allows_all or (variable, where) in self._pairs):
            raise ModelKeyError(
                f"the key in {variable} may not be used for {where} by the server on {socket.gethostname()}: "
                f"set it there and start the server with --allow-key {variable}={where}, "
                "or call with api_key_var=None if the endpoint needs no key"
            )
        return value


def origin(url: str) -> str:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    default = {"https": 443, "http": 80}.get(parts.scheme)
    port = f":{parts.port}" if parts.port is not None and parts.port != default else ""
    return f"{parts.scheme}://{(parts.hostname or '').lower()}{port}"


class ModelEndpoints:
    """Model clients for a server's rollouts, one per configuration."""

    def __init__(self, policy: KeyPolicy) -> None:
        self._clients = ModelClients(policy.key)

    def client(self, config: ClientConfig) -> Any:
        """Return the AsyncOpenAI of a configuration. The key is read, and may be refused, at its first request."""
        return self._clients.get(config)

    async def close(self) -> None:
        """Close all clients."""
        await self._clients.close()
