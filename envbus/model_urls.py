"""Model URLs: one strict reading of them, so that what is checked is what is called (pure).

Refuses every spelling that two parsers could read differently. Says which addresses nobody may call,
and which origins an operator's patterns allow.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

URL_EXAMPLE = "http://localhost:8000/v1"
ANYTHING = "*"
"""In place of a pattern: all origins."""
LOOPBACK_PATTERNS = tuple(
    f"{scheme}://{host}:*" for scheme in ("http", "https") for host in ("localhost", "127.0.0.1", "[::1]")
)
"""This host's own model servers."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?(/[^?#\\\x00-\x20\x7f-\U0010ffff]*)?",
    re.IGNORECASE | re.ASCII,
)
_PATTERN = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._*-]+)(:(?P<port>[0-9]{1,5}|\*))?/?",
    re.IGNORECASE | re.ASCII,
)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_IPV4_PREFIX = re.compile(r"((0|[1-9][0-9]{0,2})\.){1,3}\*")

_RESERVED = tuple(
    ipaddress.ip_network(network)
    for network in (
        "169.254.0.0/16",  # link-local: metadata of most clouds
        "fe80::/10",
        "fd00:ec2::/32",  # AWS
        "fd20:ce::254/128",  # Google
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure
        "192.0.0.192/32",  # Oracle
    )
)
_RESERVED_NAMES = frozenset(
    {
        "metadata",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.azure.internal",
        "metadata.tencentyun.com",
        "instance-data",
        "instance-data.ec2.internal",
    }
)
_EMBEDDING = tuple(
    ipaddress.IPv6Network(network) for network in ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")
)
"""Where the last 32 bits are an IPv4 address that is called in the end."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a URL, in their one form."""

    scheme: str
    host: str
    """A name in lower case, or an address without brackets."""
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}" + ("" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}")


def read_origin(url: str) -> Origin:
    """Return the origin of a model's base URL.

    Raises:
        ValueError: It is no such URL, or one in an odd spelling. The text does not repeat it: it may hold a password.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(
            f"must be an http or https URL like {URL_EXAMPLE}, without user name, query, spaces and escapes in the host"
        )
    return _origin(match["scheme"].lower(), match["host"].lower(), match["port"])


def _origin(scheme: str, host: str, port: str | None) -> Origin:
    number = int(port) if port is not None else _DEFAULT_PORTS[scheme]
    if not 0 < number < 65536:
        raise ValueError(f"must be an http or https URL like {URL_EXAMPLE}, with a port from 1 to 65535")
    return Origin(scheme, _host(host), number)


def _host(text: str) -> str:
    try:
        if text.startswith("["):
            address = ipaddress.IPv6Address(text[1:-1])
            return str(address.ipv4_mapped or address)
        labels = text.split(".")
        if _NUMBER.fullmatch(labels[-1]):
            return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise ValueError(
            f"must be an http or https URL like {URL_EXAMPLE}; an IP address in it is four decimal numbers, or an "
            "IPv6 address in brackets"
        ) from None
    if len(text) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"must be an http or https URL like {URL_EXAMPLE}, with a plain host name or IP address")
    return text


def is_reserved(host: str) -> bool:
    """Whether a name, or an address, is link-local or a cloud's metadata service, which nobody may call as a model."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in _RESERVED_NAMES
    return any(each in network for each in _meant(address) for network in _RESERVED if each.version == network.version)


def _meant(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The address, and the IPv4 addresses that are in it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _EMBEDDING):
        inside.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(each for each in inside if each is not None)]


@dataclass(frozen=True, slots=True)
class UrlPattern:
    """Origins that an operator allows: ``http://10.0.*:8000``, ``https://*.models.example``, ``http://node-*:*``."""

    scheme: str
    host: re.Pattern[str]
    is_address: bool
    port: int | None
    """None: any."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the pattern in a text.

        Raises:
            ValueError: It is none.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                "write SCHEME://HOST[:PORT] and no path, e.g. http://10.0.*:8000 or https://*.models.example; "
                "as PORT, * is any"
            )
        scheme, host, port = match["scheme"].lower(), match["host"].lower(), match["port"]
        origin = _origin(scheme, "any" if "*" in host else host, None if port == "*" else port)
        if "*" not in host:
            _refuse_reserved(origin.host)
            return cls(scheme, re.compile(re.escape(origin.host)), True, None if port == "*" else origin.port)
        expression, is_address = _host_expression(host)
        return cls(scheme, re.compile(expression), is_address, None if port == "*" else origin.port)

    def allows(self, origin: Origin) -> bool:
        """Whether an origin is one of these."""
        return (
            self.scheme == origin.scheme
            and self.port in (None, origin.port)
            and self.host.fullmatch(origin.host) is not None
            and (self.is_address or not is_address(origin.host))
        )


def _refuse_reserved(host: str) -> None:
    if is_reserved(host):
        raise ValueError("link-local and metadata addresses are never called")


def _host_expression(host: str) -> tuple[str, bool]:
    """A regular expression, and whether it may match IP addresses."""
    if _IPV4_PREFIX.fullmatch(host):
        if any(int(octet) > 255 for octet in host.split(".")[:-1]):
            raise ValueError("the numbers of an IPv4 address are at most 255")
        return re.escape(host[:-1]) + r"[0-9.]+", True
    first, *others = host.split(".")
    if host == ANYTHING or (others and ANYTHING in others[-1]):
        raise ValueError("* may not stand for a whole host, nor in a name's last part; write '*' alone for everything")
    labels = others if first == ANYTHING else [first, *others]
    if not all(_LABEL.fullmatch(label.replace("*", "a")) for label in labels) or _NUMBER.fullmatch(labels[-1]):
        raise ValueError("the host must be a name, or the beginning of an IPv4 address, e.g. 10.0.*")
    expression = r"\.".join(re.escape(label).replace(r"\*", "[a-z0-9_-]*") for label in labels)
    return (r"([a-z0-9_-]+\.)+" if first == ANYTHING else "") + expression, False


def is_address(host: str) -> bool:
    """Whether an origin's host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def read_key_pair(text: str) -> tuple[str, Origin]:
    """Return variable and origin of a ``VARIABLE=ORIGIN`` entry.

    Raises:
        ValueError: It is none. The text does not repeat it: it may hold a key.
    """
    variable, _, url = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable, re.ASCII) or not re.fullmatch(r"\w+://[^/]+/?", url):
        raise ValueError("write VARIABLE=https://host[:port], without a path")
    origin = read_origin(url)
    _refuse_reserved(origin.host)
    return variable, origin
