"""Model clients: one AsyncOpenAI per endpoint and event loop; keys are read when a request needs one.

The openai package is imported only when a client is made.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from envbus.errors import ModelKeyError
from envbus.types import ClientConfig, EndpointConfig

if TYPE_CHECKING:
    from openai import AsyncOpenAI

KeySource = Callable[[EndpointConfig], str]
NO_KEY = "no-key"
"""Sent to endpoints whose config names no key variable: the client library insists on some key."""
MAX_CLIENTS = 256


def environment_key(config: EndpointConfig) -> str:
    """The key that the config names, from this process's environment.

    Raises:
        ModelKeyError: The variable is unset or empty.
    """
    if config.api_key_var is None:
        return NO_KEY
    key = os.environ.get(config.api_key_var)
    if not key:
        raise ModelKeyError(
            f"environment variable {config.api_key_var} is not set on host {socket.gethostname()}, where the model at "
            f"{config.api_base_url} is called; set it there, or use api_key_var=None for an endpoint without keys"
        )
    return key


class ModelClients:
    """A bounded cache of model clients.

    Args:
        key_source: Gives the key for an endpoint, or raises ModelKeyError; asked before every request.
        max_clients: Past this many the least recently used client is closed.
    """

    def __init__(self, key_source: KeySource = environment_key, *, max_clients: int = MAX_CLIENTS) -> None:
        self._key_source = key_source
        self._max_clients = max_clients
        self._clients: OrderedDict[tuple[int, str], tuple[asyncio.AbstractEventLoop, AsyncOpenAI]] = OrderedDict()
        self._rounds: OrderedDict[str, itertools.cycle[EndpointConfig]] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, config: EndpointConfig) -> AsyncOpenAI:
        """The client for an endpoint in the running loop; of several endpoint_configs the next one's."""
        endpoint = self._next_endpoint(config)
        loop = asyncio.get_running_loop()
        key = (id(loop), endpoint.model_dump_json())
        entry = self._clients.get(key)
        if entry is None or entry[0] is not loop:
            self._forget_closed_loops()
            self._clients[key] = entry = (loop, self._new_client(endpoint))
            self._shrink(loop)
        self._clients.move_to_end(key)
        return entry[1]

    async def close(self) -> None:
        """Close the running loop's clients and forget those of loops that have ended."""
        loop = asyncio.get_running_loop()
        mine = [key for key, (owner, _) in self._clients.items() if owner is loop]
        for key in mine:
            await self._clients.pop(key)[1].close()
        self._forget_closed_loops()
        closing = {task for task in self._closing if task.get_loop() is loop}
        await asyncio.gather(*closing, return_exceptions=True)

    def _next_endpoint(self, config: EndpointConfig) -> EndpointConfig:
        if not isinstance(config, ClientConfig):
            return config
        if not config.endpoint_configs:
            return EndpointConfig(**{name: getattr(config, name) for name in EndpointConfig.model_fields})
        name = config.model_dump_json()
        endpoints = self._rounds.setdefault(name, itertools.cycle(config.endpoint_configs))
        self._rounds.move_to_end(name)
        if len(self._rounds) > self._max_clients:
            self._rounds.popitem(last=False)
        return next(endpoints)

    def _new_client(self, config: EndpointConfig) -> AsyncOpenAI:
        import openai

        async def key() -> str:
            return self._key_source(config)

        # The limits class belongs to the HTTP library of the installed openai version.
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
            max_connections=config.max_connections, max_keepalive_connections=config.max_keepalive_connections
        )
        timeout = openai.Timeout(config.timeout, connect=config.connect_timeout)
        # No redirects: they would carry headers and prompts to a host that the caller never named.
        http_client = openai.DefaultAsyncHttpxClient(timeout=timeout, limits=limits, follow_redirects=False)
        return openai.AsyncOpenAI(
            api_key=key,
            base_url=config.api_base_url,
            timeout=timeout,
            max_retries=config.max_retries,
            default_headers=config.extra_headers,
            http_client=http_client,
        )

    def _shrink(self, loop: asyncio.AbstractEventLoop) -> None:
        if len(self._clients) > self._max_clients:
            _, (owner, client) = self._clients.popitem(last=False)
            if owner is loop:
                task = loop.create_task(client.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _forget_closed_loops(self) -> None:
        for key in [key for key, (loop, _) in self._clients.items() if loop.is_closed()]:
            del self._clients[key]


_local_clients = ModelClients()


def resolve_client(client: Any, clients: ModelClients = _local_clients) -> Any:
    """A live model client: made, or found in the cache, for a config; anything else is returned as it is."""
    return clients.get(client) if isinstance(client, EndpointConfig) else client


async def close_clients() -> None:
    """Close the clients that this event loop made from configs."""
    await _local_clients.close()
