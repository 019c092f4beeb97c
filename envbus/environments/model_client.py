"""Model clients: one AsyncOpenAI per endpoint and event loop; keys are read when a request needs one.

The openai package is imported only when a client is made.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envbus.environments.circuits import Circuits
from envbus.errors import ModelAddressError, ModelKeyError
from envbus.model_urls import Origin, is_reserved, read_origin
from envbus.types import ClientConfig, EndpointConfig

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from envbus.environments.endpoint_client import EndpointClient

log = logging.getLogger(__name__)

KeySource = Callable[[EndpointConfig], str]
NO_KEY = "no-key"
"""Sent to endpoints whose config names no key variable: the client library insists on some key."""
OPENAI_KEY = "OPENAI_API_KEY"
"""The variable whose key the ids in OPENAI_ORG_ID and OPENAI_PROJECT_ID belong to."""
MAX_CLIENTS = 256


def environment_key(config: EndpointConfig) -> str:
    """The key that the config names, from this process's environment.

    Raises:
        ModelKeyError: The variable holds no key.
        ModelAddressError: The URL leads to an address that nobody may call.
    """
    refuse_reserved(config.api_base_url)
    if config.api_key_var is None:
        return NO_KEY
    key = usable_key(os.environ.get(config.api_key_var, ""))
    if key is None:
        raise ModelKeyError(
            f"environment variable {config.api_key_var} is not set to a key on host {socket.gethostname()}, where the "
            f"model at {config.api_base_url} is called; set it there, or use api_key_var=None for an endpoint without "
            "keys"
        )
    return key


def usable_key(value: str) -> str | None:
    """The key in a variable; None if it can be none. What cannot be sent would be quoted in errors."""
    key = value.strip()
    return key if key.isascii() and key.isprintable() and key else None


def refuse_reserved(url: str) -> Origin:
    """The origin of a model's URL.

    Raises:
        ModelAddressError: It is link-local, or a cloud's metadata service.
    """
    origin = read_origin(url)
    if is_reserved(origin.host):
        raise ModelAddressError(f"{origin} is a link-local or metadata address: no model is ever called there")
    return origin


@dataclass(frozen=True, slots=True)
class _EndpointHealth:
    """Passes on how tries at one endpoint end, and logs when it is left out and when it is back."""

    circuits: Circuits
    name: str
    base_url: str

    def answered(self) -> None:
        if self.circuits.answered(self.name):
            log.info("the model endpoint %s answers again", self.base_url)

    def failed(self) -> None:
        if self.circuits.failed(self.name, time.monotonic()):
            # Whether there are others is not known here: callers with one endpoint and with several share its client.
            log.warning(
                "the model endpoint %s fails: calls go to other endpoints of its model until it answers; "
                "without any they are tried again there",
                self.base_url,
            )


class ModelClients:
    """A bounded cache of model clients, and what is known of their endpoints.

    Args:
        key_source: Gives the key for an endpoint, or raises ModelKeyError; asked before every request.
        uses_proxies: Whether the proxies that the environment names are used; they are told in the log either way.
        max_clients: Past this many the least recently used client is let go, and closed once no rollout has it.
        circuits: Which endpoints are left out where there are several.
    """

    def __init__(
        self,
        key_source: KeySource = environment_key,
        *,
        uses_proxies: bool = True,
        max_clients: int = MAX_CLIENTS,
        circuits: Circuits | None = None,
    ) -> None:
        self._key_source = key_source
        self._uses_proxies = uses_proxies
        self._max_clients = max_clients
        self._circuits = Circuits() if circuits is None else circuits
        self._clients: OrderedDict[tuple[int, str], tuple[asyncio.AbstractEventLoop, EndpointClient]] = OrderedDict()
        self._rounds: OrderedDict[str, int] = OrderedDict()
        self._let_go: weakref.WeakKeyDictionary[EndpointClient, asyncio.AbstractEventLoop] = weakref.WeakKeyDictionary()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, config: EndpointConfig) -> AsyncOpenAI:
        """The client for an endpoint in the running loop; of several endpoint_configs the next one's that answers."""
        if not isinstance(config, ClientConfig):
            return self._client(config)
        if not config.endpoint_configs:
            return self._client(EndpointConfig(**{name: getattr(config, name) for name in EndpointConfig.model_fields}))
        ring = self._ring(config)
        client: EndpointClient = self._client(ring[0]).copy()
        client.clients_in_turn = lambda: self._clients_in_turn(ring)
        return client

    def next_endpoint(self, config: ClientConfig) -> EndpointConfig:
        """The endpoint that a rollout which calls it by itself is to use: the next in turn."""
        return self._ring(config)[0] if config.endpoint_configs else config

    async def close(self) -> None:
        """Close the running loop's clients and forget those of loops that have ended."""
        loop = asyncio.get_running_loop()
        kept = [key for key, (owner, _) in self._clients.items() if owner is loop]
        let_go = [client for client, owner in self._let_go.items() if owner is loop]
        for client in [self._clients.pop(key)[1] for key in kept] + let_go:
            await client.close()
        self._forget_closed_loops()
        closing = {task for task in self._closing if task.get_loop() is loop}
        await asyncio.gather(*closing, return_exceptions=True)

    def _ring(self, config: ClientConfig) -> Sequence[EndpointConfig]:
        """All endpoints, from the one that is wanted, or the next in turn, if it is not left out."""
        endpoints, name, now_s = config.endpoint_configs, config.model_dump_json(), time.monotonic()
        turn = self._rounds.pop(name, 0)
        in_turn = [(turn + skip) % len(endpoints) for skip in range(len(endpoints))]
        first = next((n for n in in_turn if self._circuits.is_due(_name(endpoints[n]), now_s)), turn)
        if not config.keep_order:
            self._rounds[name] = (first + 1) % len(endpoints)
            if len(self._rounds) > self._max_clients:
                self._rounds.popitem(last=False)
        return endpoints[first:] + endpoints[:first]

    def _clients_in_turn(self, ring: Sequence[EndpointConfig]) -> list[EndpointClient]:
        """Whom one call asks: the first that takes it, then those that answer. Where none does, its own alone."""
        for each in ring:
            self._key_source(each)  # none may be called where one may not
        now_s = time.monotonic()
        first = next((each for each in ring if self._circuits.enter(_name(each), now_s)), ring[0])
        others = [each for each in ring if each is not first and self._circuits.is_closed(_name(each))]
        return [self._client(each) for each in (first, *others)]

    def _client(self, endpoint: EndpointConfig) -> EndpointClient:
        loop = asyncio.get_running_loop()
        key = (id(loop), _name(endpoint))
        entry = self._clients.get(key)
        if entry is None or entry[0] is not loop:
            self._forget_closed_loops()
            self._clients[key] = entry = (loop, self._new_client(endpoint))
            self._shrink()
        self._clients.move_to_end(key)
        # A trainer may want other headers for each example: those share one client's connections.
        headers = endpoint.extra_headers
        return entry[1].copy(default_headers=headers) if headers else entry[1]

    def _new_client(self, config: EndpointConfig) -> EndpointClient:
        import openai

        from envbus.environments.endpoint_client import EndpointClient, EndpointHttpClient

        async def key() -> str:
            return self._key_source(config)

        # The limits class belongs to the HTTP library of the installed openai version.
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=config.max_connections, max_keepalive_connections=config.max_keepalive_connections
        )
        timeout = openai.Timeout(config.timeout, connect=config.connect_timeout)
        health = _EndpointHealth(self._circuits, _name(config), config.api_base_url)
        http_client = EndpointHttpClient(
            config.api_base_url, health, uses_proxies=self._uses_proxies, timeout=timeout, limits=limits
        )
        client = EndpointClient(
            api_key=key,
            base_url=config.api_base_url,
            timeout=timeout,
            max_retries=config.max_retries,
            http_client=http_client,
        )
        client.has_openai_ids = config.api_key_var == OPENAI_KEY
        weakref.finalize(client, self._close_unused, asyncio.get_running_loop(), http_client).atexit = False
        return client

    def _shrink(self) -> None:
        """Let go of the least recently used client; it is closed when the last rollout that has it lets go too."""
        if len(self._clients) > self._max_clients:
            _, (loop, client) = self._clients.popitem(last=False)
            self._let_go[client] = loop

    def _close_unused(self, loop: asyncio.AbstractEventLoop, http_client: Any) -> None:
        if http_client.is_closed:
            return
        with suppress(RuntimeError):  # the loop has ended, and its connections with it
            loop.call_soon_threadsafe(self._close_soon, http_client)

    def _close_soon(self, http_client: Any) -> None:
        task = asyncio.get_running_loop().create_task(http_client.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _forget_closed_loops(self) -> None:
        for key in [key for key, (loop, _) in self._clients.items() if loop.is_closed()]:
            del self._clients[key]


def _name(endpoint: EndpointConfig) -> str:
    """Which endpoint, called how: clients with other settings have other connections and another health.

    Not so with other headers.
    """
    return endpoint.model_dump_json(exclude={"extra_headers"})


_local_clients = ModelClients()


def resolve_client(client: Any, clients: ModelClients = _local_clients) -> Any:
    """A live model client: made, or found in the cache, for a config; anything else is returned as it is."""
    return clients.get(client) if isinstance(client, EndpointConfig) else client


async def close_clients() -> None:
    """Close the clients that this event loop made from configs."""
    await _local_clients.close()
