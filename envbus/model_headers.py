"""Which headers a call may add to its model requests (pure).

Not those that carry credentials, which are the server's to give, nor those that say where a request goes or ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CREDENTIAL_HEADERS = frozenset(
    {
        "api-key",
        "authorization",
        "cookie",
        "cookie2",
        "ocp-apim-subscription-key",
        "proxy-authenticate",
        "proxy-authorization",
        "set-cookie",
        "www-authenticate",
        "x-api-key",
        "x-auth-token",
        "x-goog-api-key",
    }
)
_ROUTING_HEADERS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "expect",
        "forwarded",
        "host",
        "http2-settings",
        "keep-alive",
        "metadata",
        "metadata-flavor",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-host",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-original-host",
        "x-original-url",
        "x-real-ip",
        "x-rewrite-url",
    }
)
_REFUSED_PREFIXES = ("proxy-", "sec-", "x-aws-ec2-metadata-", "x-forwarded-")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_VALUE = re.compile(r"[\t\x20-\x7e]*", re.ASCII)


def check_headers(headers: Iterable[tuple[str, str]], *, credentials: bool = False) -> None:
    """Check names and values.

    Args:
        headers: Pairs of name and value.
        credentials: Whether headers with credentials are allowed: their values are from the server's environment.

    Raises:
        ValueError: One may not be set. The text has its name only: the value may be secret.
    """
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"{name[:100]!r} is not a valid header")
        lower = name.lower()
        is_refused = lower in _ROUTING_HEADERS or lower.startswith(_REFUSED_PREFIXES)
        if is_refused or (lower in CREDENTIAL_HEADERS and not credentials):
            raise ValueError(
                f"{name!r} may not be set: keys go by the variable that api_key_var names, and where a request goes "
                "is said by the URL"
            )
