"""Which model URLs and API keys a server may use; makes the model clients of its rollouts.

Nothing is allowed that the operator did not name: a key goes only to its origins, and no other origin is called.
Unset, unknown and mismatched get the same refusal, so that a client learns nothing about the environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from envbus.bus.loopback import is_loopback, loopback_id
from envbus.environments.model_client import NO_KEY, KeySource, ModelClients, refuse_reserved, usable_key
from envbus.errors import ModelAddressError, ModelKeyError, UsageError
from envbus.model_urls import ANYTHING, Origin, UrlPattern, read_key_pair
from envbus.types import CheckedClient, ClientConfig, EndpointConfig


class KeyPolicy:
    """What a server's rollouts may call: pairs of a key's variable and an origin, and origins without a key.

    Args:
        allow_keys: Entries ``"VARIABLE=ORIGIN"``, e.g. ``"OPENAI_API_KEY=https://api.openai.com"``; the origin may then
            be called without a key, too. ``"*"`` allows every key and URL: only for a server that nobody but its own
            user can reach.
        allow_urls: Patterns of origins that may be called without a key, e.g. ``"http://10.0.*:8000"``; ``"*"``: all.
        server_id: Whose policy it is, for its refusals.

    Raises:
        UsageError: An entry is not of that form. Its text is not repeated: it may hold a key.
    """

    def __init__(self, allow_keys: Iterable[str] = (), allow_urls: Iterable[str] = (), *, server_id: str = "") -> None:
        self._place = f"server {server_id} on {socket.gethostname()}"
        keys, urls = set(allow_keys), set(allow_urls)
        self.allows_all = ANYTHING in keys
        """Whether its callers are trusted with all that this process has."""
        self._allows_all_urls = self.allows_all or ANYTHING in urls
        self._pairs: set[tuple[str, Origin]] = set()
        self._patterns: list[UrlPattern] = []
        for entry in keys - {ANYTHING}:
            try:
                self._pairs.add(read_key_pair(entry))
            except ValueError as error:
                raise UsageError(f"--allow-key: {error}") from None
        for entry in urls - {ANYTHING}:
            try:
                self._patterns.append(UrlPattern.read(entry))
            except ValueError as error:
                raise UsageError(f"--allow-url: {error}") from None

    @property
    def none_allowed(self) -> bool:
        """Whether no model at all may be called."""
        return not (self._allows_all_urls or self._pairs or self._patterns)

    def key(self, endpoint: EndpointConfig) -> str:
        """Return the key for an endpoint.

        Raises:
            ModelKeyError: The pair is not allowed, or the variable is not set.
            ModelAddressError: The URL is not allowed.
        """
        where = refuse_reserved(endpoint.api_base_url)
        variable = endpoint.api_key_var
        if variable is None:
            return self._no_key(where)
        allowed = self.allows_all or (variable, where) in self._pairs
        key = usable_key(os.environ.get(variable, "")) if allowed else None
        if key is None:
            raise ModelKeyError(
                f"the key in {variable} may not be used for {where} by {self._place}: "
                f"set it there and start the server with --allow-key {variable}={where}, "
                "or call with api_key_var=None if the endpoint needs no key"
            )
        return key

    def _no_key(self, where: Origin) -> str:
        if not (
            self._allows_all_urls
            or any(where == origin for _, origin in self._pairs)
            or any(pattern.allows(where) for pattern in self._patterns)
        ):
            raise ModelAddressError(
                f"{where} may not be called by {self._place}: start the server with --allow-url {where}"
            )
        return NO_KEY


class ModelEndpoints:
    """Model clients for a server's rollouts, one per configuration.

    Args:
        policy: What may be called, and with which keys.
        loopback: Which loopback is this server's.
        model_proxy: Use the proxies that the environment names; else they are passed over.
    """

    def __init__(self, policy: KeyPolicy, *, loopback: str | None = None, model_proxy: bool = False) -> None:
        self._policy = policy
        self.remark = "; it may call no model without --allow-key or --allow-url" if policy.none_allowed else ""
        self._loopback = loopback or loopback_id()
        self._clients = ModelClients(policy.key, uses_proxies=model_proxy)
        self._clients_of_elsewhere = ModelClients(self._key_for_elsewhere, uses_proxies=model_proxy)

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
        key = self._key_for_elsewhere if self._is_elsewhere(loopback) else self._policy.key
        endpoint = self._clients.next_endpoint(config) if config is not None else None
        check = partial(_key_if_all_may, key, config.endpoint_configs if config is not None else ())
        return CheckedClient(endpoint, check, trusts_caller=self._policy.allows_all)

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


def _key_if_all_may(key: KeySource, others: Iterable[EndpointConfig], endpoint: EndpointConfig) -> str:
    for each in others:
        key(each)
    return key(endpoint)


def _advertised(url: str) -> str:
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port is not None else ""
    return f"{parts.scheme}://HOST{port}{parts.path}"
