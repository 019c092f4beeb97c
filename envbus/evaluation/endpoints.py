"""Which model endpoint an example uses, and how endpoints are named in saved runs (pure)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from envbus.types import ClientConfig


def client_for_example(client: Any, example_index: int) -> Any:
    """The client for one example: of several endpoints each is the first in turn, and the others are for its failures.

    So all rollouts of an example have the same endpoint. Anything but a config of several is used as it is.
    """
    if not isinstance(client, ClientConfig) or not client.endpoint_configs or client.keep_order:
        return client
    first = example_index % len(client.endpoint_configs)
    turned = client.endpoint_configs[first:] + client.endpoint_configs[:first]
    return client.model_copy(update={"endpoint_configs": turned, "keep_order": True})


def describe_base_url(client: Any) -> str:
    """The client's base URLs joined by commas, without user names and passwords."""
    if isinstance(client, ClientConfig):
        endpoints = client.endpoint_configs or (client,)
        return ",".join(_without_userinfo(endpoint.api_base_url) for endpoint in endpoints)
    return _without_userinfo(str(getattr(client, "base_url", "")))


def _without_userinfo(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
