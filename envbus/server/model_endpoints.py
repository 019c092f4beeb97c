"""Which API keys and URLs a server may use; makes the model clients of its rollouts.

A key goes only to an origin that the operator allowed for it. Unset, unknown and mismatched get the same
refusal, so that a client learns nothing about the environment. Loopback URLs of clients elsewhere are refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from envbus.bus.loopback import is_loopback, loopback_id
from envbus.environments.model_client import NO_KEY, ModelClients
from envbus.errors import ModelAddressError, ModelKeyError, UsageError
from envbus.types import CheckedClient, ClientConfig, EndpointConfig

ANY_KEY = "*"


class KeyPolicy:
    """Pairs of a key's variable and the origin it may be sent to.

    Args:
        allowed: Entries ``"VARIABLE=ORIGIN"``, e.g. ``"OPENAI_API_KEY=https://api.openai.com"``; ``"*"`` allows
            every key everywhere: only for a server that nobody but its own user can reach.
        server_id: Whose policy it is, for its refusals.

    Raises:
        UsageError: An entry is not of that form.
    """

    def __init__(self, allowed: Iterable[str] = (), *, server_id: str = "") -> None:
        self._place = f"server {server_id} on {socket.gethostname()}"
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
                f"the key in {variable} may not be used for {where} by {self._place}: "
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
    """Model clients for a server's rollouts, one per configuration.

    Args:
        policy: Which keys may be used.
        loopback: Which loopback is this server's.
    """

    def __init__(self, policy: KeyPolicy, *, loopback: str | None = None) -> None:
        self._policy = policy
        self._loopback = loopback or loopback_id()
        self._clients = ModelClients(policy.key)
        self._clients_of_elsewhere = ModelClients(self._key_for_elsewhere)

    def client(self, config: ClientConfig, *, loopback: str | None = None) -> Any:
        """Return the AsyncOpenAI of a configuration. What it may not do is refused at its first request.

        Args:
            config: Where the model is, and the name of its key.
            loopback: Whose loopback the URLs mean; None if that is unknown, or of no matter.
        """
        return (self._clients_of_elsewhere if self._is_elsewhere(loopback) else self._clients).get(config)

    def checked(self, config: ClientConfig | None, *, loopback: str | None = None) -> CheckedClient:
        """Return a configuration for an environment that makes its clients by itself, and what it must ask before.

        Args:
            config: As for client(); None where the call names no model.
            loopback: As for client().
        """
        check = self._key_for_elsewhere if self._is_elsewhere(loopback) else self._policy.key
        return CheckedClient(self._clients.next_endpoint(config) if config is not None else None, check)

    async def close(self) -> None:
        """Close all clients."""
        await self._clients.close()
        await self._clients_of_elsewhere.close()

    def _is_elsewhere(self, loopback: str | None) -> bool:
        return None not in (loopback, self._loopback) and loopback != self._loopback

    def _key_for_elsewhere(self, endpoint: EndpointConfig) -> str:
        url = endpoint.api_base_url
        if is_loopback(url) and not endpoint.on_server_host:
            raise ModelAddressError(
                f"{url} is a loopback URL of the client's host; on {socket.gethostname()}, where this server runs, it "
                "leads elsewhere: set api_base_url to an address that other hosts reach, such as "
                f"{_advertised(url)} (the model must listen there, not only on loopback), or set on_server_host=True "
                "if there is a model beside each server"
            )
        return self._policy.key(endpoint)


def _advertised(url: str) -> str:
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://HOST{port}{parts.path}"
