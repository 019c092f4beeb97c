"""Which model endpoint an example uses, and how endpoints are named in saved runs (pure)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from envbus.types import ClientConfig


def client_for_example(client: Any, example_index: int) -> Any:
    """The client for one example: a config of several endpoints is used round robin, anything else as it is."""
    if not isinstance(client, ClientConfig) or not client.endpoint_configs:
        return client
    endpoint = client.endpoint_configs[example_index % len(client.endpoint_configs)]
    return ClientConfig(client_type=client.client_type, **endpoint.model_dump())


def describe_base_url(client: Any) -> str:
    """The client's base URLs joined by commas, without user names and passwords."""
    if isinstance(client, ClientConfig):
        endpoints = client.endpoint_configs or (client,)
        return ",".join(_without_userinfo(endpoint.api_base_url) for endpoint in endpoints)
    return _without_userinfo(str(getattr(client, "base_url", "")))


def _without_userinfo(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
