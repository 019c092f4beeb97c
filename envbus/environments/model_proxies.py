"""Which proxy of the environment (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY) a model is behind; it is told once."""

from __future__ import annotations

import logging
import urllib.request
from urllib.parse import urlsplit

from envbus.bus.loopback import is_loopback
from envbus.model_urls import Origin

log = logging.getLogger(__name__)

_told: set[tuple[str, bool]] = set()


def proxy_for(origin: Origin) -> str | None:
    """The URL of the proxy that the environment names for an origin; loopback is never behind one."""
    proxies = urllib.request.getproxies_environment()
    proxy = proxies.get(origin.scheme) or proxies.get("all")
    if not proxy or is_loopback(str(origin)):
        return None
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    if urllib.request.proxy_bypass_environment(f"{host}:{origin.port}", proxies):  # type: ignore[attr-defined]
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def tell_proxy(proxy: str, *, is_used: bool) -> None:
    """Say once that a proxy is used, or that it is passed over."""
    place = _place(proxy)
    if (place, is_used) in _told:
        return
    _told.add((place, is_used))
    if is_used:
        log.warning(
            "model requests go through the proxy %s, which the environment names; NO_PROXY excepts hosts", place
        )
    else:
        log.warning("the environment names the proxy %s; model requests pass it over without --model-proxy", place)


def _place(proxy: str) -> str:
    """Where it is, without user name and password."""
    try:
        parts = urlsplit(proxy)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "(no URL)"
