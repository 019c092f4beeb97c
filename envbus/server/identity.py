"""Who a server is and what exactly it serves."""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from envbus.bus.messages import PROTOCOL_VERSION
from envbus.bus.subjects import env_name

_PACKAGES = ("envbus", "verifiers")


@dataclass(frozen=True, slots=True)
class Identity:
    """A server's ids and versions.

    Attributes:
        env: The env's name on the bus.
        fingerprint: 16 hex digits of env_id, arguments and the env package's version.
    """

    server_id: str
    env: str
    env_id: str
    env_args: dict[str, Any]
    versions: dict[str, str]
    fingerprint: str


def new_identity(
    env_id: str, env_args: Mapping[str, Any] | None, name: str | None, server_id: str | None = None
) -> Identity:
    """Make up the identity of a server that starts now."""
    versions = _versions(env_id)
    args = dict(env_args or {})
    served = json.dumps([env_id, args, versions.get("env")], sort_keys=True, default=str)
    return Identity(
        server_id=server_id or secrets.token_hex(16),
        env=env_name(env_id, args, name),
        env_id=env_id,
        env_args=args,
        versions=versions,
        fingerprint=hashlib.sha256(served.encode("utf-8", "surrogatepass")).hexdigest()[:16],
    )


def _versions(env_id: str) -> dict[str, str]:
    versions = {"protocol": str(PROTOCOL_VERSION), "python": platform.python_version()}
    for package in _PACKAGES:
        version = _version(package)
        if version is not None:
            versions[package] = version
    versions["env"] = _version(env_id.rpartition("/")[2].partition("@")[0]) or versions.get("envbus", "?")
    return versions


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return None
