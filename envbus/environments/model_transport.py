"""How model requests leave this process: to one origin, at addresses that were checked, by no proxy in silence.

Answers come back unpacked, and without the credentials of their request. Works with the HTTP library of whoever
calls (httpx, or the one of the installed openai version), which is passed in as a module.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import ModuleType
from typing import Any, Self

from envbus.environments.answer_bytes import Secrets, unpacked
from envbus.environments.checked_connect import CheckedBackend
from envbus.environments.model_proxies import proxy_for, tell_proxy
from envbus.errors import ModelAddressError, ModelError
from envbus.model_headers import CREDENTIAL_HEADERS
from envbus.model_urls import Origin, is_reserved, read_origin

BODY_HEADERS = ("content-encoding", "content-length", "transfer-encoding")


class ModelTransport:
    """The transport of one client of the HTTP library.

    Args:
        http: The library.
        base_url: Whose origin alone is called; None: the caller has checked what it calls.
        uses_proxies: Whether the proxies that the environment names are used.
        limits: Of connections.
        credential_headers: Further headers, in lower case, whose values must not be in an answer.
    """

    def __init__(
        self,
        http: ModuleType,
        base_url: str | None,
        *,
        uses_proxies: bool,
        limits: Any,
        credential_headers: Collection[str] = (),
    ) -> None:
        self._http = http
        self._origin = read_origin(base_url) if base_url is not None else None
        self._uses_proxies = uses_proxies
        self._limits = limits
        self._credential_headers = CREDENTIAL_HEADERS.union(credential_headers)
        self._transports: dict[str | None, Any] = {}

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request.

        Raises:
            ModelAddressError: It would go to another origin, or to an address that nobody may call.
        """
        origin = self._checked(request.url)
        secrets = self._secrets(request.headers)
        request.headers["accept-encoding"] = "gzip, deflate"
        try:
            response = await self._transport(origin).handle_async_request(request)
        except Exception as error:
            if not secrets.are_in(f"{error!r} {error}"):
                raise
            failed = type(error).__name__
        else:
            return self._plain(response, secrets, origin)
        raise _failure(origin, failed)

    async def aclose(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _checked(self, url: Any) -> Origin:
        try:
            origin = read_origin(f"{url.scheme}://{url.netloc.decode('ascii')}")
        except ValueError as error:
            raise ModelAddressError(f"a model's URL {error}") from None
        if self._origin is not None and origin != self._origin:
            raise ModelAddressError(f"a request to {origin} was stopped: its client calls {self._origin} alone")
        if is_reserved(origin.host):
            raise ModelAddressError(f"{origin} is a link-local or metadata address: no model is ever called there")
        return origin

    def _secrets(self, headers: Any) -> Secrets:
        carried = [value for name, value in headers.items() if name.lower() in self._credential_headers]
        return Secrets([*carried, *(value.partition(" ")[2] for value in carried)])

    def _transport(self, origin: Origin) -> Any:
        proxy = proxy_for(origin)
        if proxy is not None:
            tell_proxy(proxy, is_used=self._uses_proxies)
        proxy = proxy if self._uses_proxies else None
        if proxy not in self._transports:
            self._transports[proxy] = self._new_transport(proxy)
        return self._transports[proxy]

    def _new_transport(self, proxy: str | None) -> Any:
        try:
            transport = self._http.AsyncHTTPTransport(limits=self._limits, proxy=proxy)
        except ImportError:
            raise ModelAddressError("the environment's SOCKS proxy needs: pip install socksio") from None
        except (ValueError, self._http.InvalidURL) as error:
            raise ModelAddressError(f"the environment's proxy is of no use: {type(error).__name__}") from None
        _log_no_answers(type(transport._pool).__module__)
        if proxy is None:
            # No setting takes a network backend; a library without this attribute makes no clients.
            transport._pool._network_backend = CheckedBackend(transport._pool._network_backend)
        return transport

    def _plain(self, response: Any, secrets: Secrets, origin: Origin) -> Any:
        encoding = response.headers.get("content-encoding", "").strip().lower()
        is_packed = encoding not in ("", "identity")
        if not is_packed and not secrets:
            return response
        pieces: AsyncIterator[bytes] = aiter(response.stream)
        pieces = unpacked(pieces, encoding) if is_packed else pieces
        headers = [pair for pair in response.headers.raw if pair[0].lower().decode("latin-1") not in BODY_HEADERS]
        reason = ("reason_phrase",) if secrets else ()
        return self._http.Response(
            response.status_code,
            headers=[(name, secrets.masked(value)) for name, value in headers],
            stream=_stream_class(self._http)(_without(secrets, pieces, origin), response.stream),
            extensions={name: value for name, value in response.extensions.items() if name not in reason},
        )


def no_cookies() -> CookieJar:
    """For a client that many callers share: cookies of an endpoint would tie them together, or to one of its hosts."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


async def _without(secrets: Secrets, pieces: AsyncIterator[bytes], origin: Origin) -> AsyncIterator[bytes]:
    try:
        async for piece in secrets.taken_out(pieces):
            yield piece
        return
    except Exception as error:
        if not secrets.are_in(f"{error!r} {error}"):
            raise
        failed = type(error).__name__
    raise _failure(origin, failed)


def _failure(origin: Origin, failed: str) -> ModelError:
    """In place of an error that quotes a header that cannot be sent, or bytes of an answer that cannot be read.

    To be raised where that one is not handled any more: it would be held as the context.
    """
    return ModelError(f"the request to {origin} failed ({failed}); what was said of it quotes the key")


@cache
def _log_no_answers(module: str) -> None:
    """At DEBUG the library below logs heads of answers as they come, keys in them included: such lines are left out."""
    logger = logging.getLogger(f"{module.partition('.')[0]}.http11")
    logger.addFilter(lambda record: not record.getMessage().startswith("receive_response_"))


@cache
def _stream_class(http: ModuleType) -> Any:
    class Stream(http.AsyncByteStream):  # type: ignore[misc, name-defined]
        """Pieces made of those of another stream, which is closed in the end."""

        def __init__(self, pieces: AsyncIterator[bytes], source: Any) -> None:
            self._pieces, self._source = pieces, source

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self._pieces

        async def aclose(self) -> None:
            await self._source.aclose()

    return Stream
