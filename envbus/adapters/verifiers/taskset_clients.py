"""Puts our transport under the model clients of verifiers 0.4, which it makes by itself, judges' included.

Its functions that make them are replaced, for the whole process. Imports verifiers: import it only where that is used.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import httpx
from verifiers.v1.clients import base, eval, train
from verifiers.v1.configs.client import BaseClientConfig, resolve_headers
from verifiers.v1.interception import server

from envbus.environments.model_transport import ModelTransport, no_cookies

_build_async_openai = base.build_async_openai


def use_our_transport(*, uses_proxies: bool) -> None:
    """From now on; each client calls the origin of its config alone.

    Args:
        uses_proxies: Whether the proxies that the environment names are used.
    """
    build = partial(_http_client, uses_proxies=uses_proxies)
    base.build_async_httpx = eval.build_async_httpx = build
    train.build_async_openai = _openai_client
    server.httpx = _with_client(httpx, partial(_unbound_client, uses_proxies=uses_proxies))


def _http_client(config: BaseClientConfig, *, uses_proxies: bool) -> httpx.AsyncClient:
    transport = ModelTransport(
        httpx,
        config.base_url,
        uses_proxies=uses_proxies,
        limits=base.DEFAULT_LIMITS,
        credential_headers={name.lower() for name in config.headers_from_env},
    )
    timeout = httpx.Timeout(**config.timeout.model_dump())
    return httpx.AsyncClient(timeout=timeout, transport=_typed(transport), follow_redirects=False, cookies=no_cookies())


def _unbound_client(*, uses_proxies: bool, **settings: Any) -> httpx.AsyncClient:
    """For the list of models, which is asked for where the call's model is."""
    transport = ModelTransport(httpx, None, uses_proxies=uses_proxies, limits=base.DEFAULT_LIMITS)
    return httpx.AsyncClient(transport=_typed(transport), **settings)


def _openai_client(config: BaseClientConfig) -> Any:
    client = _build_async_openai(config)
    # It adds what variables of this process hold, whatever the endpoint.
    client.organization = client.project = None
    client._custom_headers = resolve_headers(config)
    return client


def _with_client(library: ModuleType, client: Any) -> Any:
    changed = ModuleType(library.__name__)
    vars(changed).update(vars(library), AsyncClient=client)
    return changed


def _typed(transport: ModelTransport) -> Any:
    return transport
