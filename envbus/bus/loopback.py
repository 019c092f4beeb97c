"""Loopback: whether a URL leads to it, and whose it is; a URL to it means something only where it was written.

Two processes with the same id share a loopback. Containers on one machine have one each.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from pathlib import Path
from urllib.parse import urlsplit

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def is_loopback(url: str) -> bool:
    """Whether a URL's host is the loopback, or any address of the host that opens it."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".").lower()
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def loopback_id() -> str | None:
    """Which loopback this process has: the same for all processes of its host, or of its container; None off Linux."""
    try:
        # A network namespace has one, and a number that is unique until the next boot.
        parts = [_BOOT_ID.read_text().strip(), str(os.stat(_NETWORK).st_ino)]
    except OSError:
        return None
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:32]
