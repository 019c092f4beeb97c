"""An AsyncOpenAI whose calls end: one time limit for all tries of a call, a bound for answers, no redirects.

The library retries and waits (jittered backoff, Retry-After up to 120 s). What it lacks is here. With several endpoints
a call that one of them fails goes on to the others that answer. Imports openai: import it only to make a client.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import openai

from envbus.environments.model_transport import BODY_HEADERS, ModelTransport, no_cookies
from envbus.environments.model_tries import MAX_EXCERPT_CHARS, counted_tries, current_tries, excerpt
from envbus.errors import InvalidModelResponseError, ModelAddressError, ModelError, ModelTimeoutError
from envbus.model_headers import check_headers

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Ceiling for one answer, unpacked."""
RETRIES_BEFORE_NEXT = 2
"""Retries at an endpoint while another one answers; the last one asked gets all that its config allows."""
WAIT_JITTER = 0.25
"""Clients that were told the same Retry-After come back spread over this part of it."""
_ID_HEADERS = ("OpenAI-Organization", "OpenAI-Project")
_HTTP = sys.modules[type(openai.DEFAULT_CONNECTION_LIMITS).__module__.partition(".")[0]]
"""The HTTP library of the installed openai version."""


class Health(Protocol):
    """Hears how the tries at one endpoint end."""

    def answered(self) -> None:
        """It answered, with anything but a 5xx."""

    def failed(self) -> None:
        """It could not be reached, gave no answer, or answered 5xx."""


class EndpointClient(openai.AsyncOpenAI):
    """The client of one endpoint, or of several of one model."""

    clients_in_turn: Callable[[], Sequence[EndpointClient]] | None = None
    """Whom a call asks, the first first; None: this client alone."""
    has_openai_ids = False
    """Whether the ids in OPENAI_ORG_ID and OPENAI_PROJECT_ID are sent: they belong to OpenAI's key."""
    _origin: EndpointClient | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # The library adds those in OPENAI_CUSTOM_HEADERS, secrets maybe, whatever the endpoint.
        self._custom_headers = dict(settings.get("default_headers") or {})

    @property
    def default_headers(self) -> dict[str, Any]:
        """Those of each request."""
        headers: dict[str, Any] = dict(super().default_headers)
        if not self.has_openai_ids:
            headers = {name: value for name, value in headers.items() if name not in _ID_HEADERS}
        return {**headers, **self._custom_headers}

    async def request(self, cast_to: Any, options: Any, **settings: Any) -> Any:
        """Make a call, as the library does; ends within the client's timeout.

        Raises:
            ModelTimeoutError: Tries, waits and answers took longer.
            ModelError: The call adds headers that it may not, or has a timeout that is none.
            openai.OpenAIError: As the library raises.
        """
        _check_headers(options.headers)
        _check_timeout(options.timeout)
        limit_s = _limit_s(options.timeout, _limit_s(self.timeout, None))
        with counted_tries() as tries:
            try:
                async with asyncio.timeout(limit_s) as scope:
                    tries.limit = scope
                    return await self._ask_in_turn(cast_to, options, settings)
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise ModelTimeoutError(
                    f"{tries.base_url or self.base_url} did not answer in time after {tries}: a call may take "
                    f"timeout = {limit_s:g} s, all tries and waits counted{tries.last_words}"
                ) from error

    def copy(self, **changes: Any) -> Any:
        """A client with other settings that shares this one's connections."""
        copied = super().copy(**changes)
        copied.clients_in_turn = self.clients_in_turn
        copied.has_openai_ids = self.has_openai_ids
        copied._origin = self  # its connections are closed when it is let go
        return copied

    with_options = copy

    async def _ask_in_turn(self, cast_to: Any, options: Any, settings: dict[str, Any]) -> Any:
        clients = list(self.clients_in_turn()) if self.clients_in_turn is not None else [self]
        for client in clients[:-1]:
            retries = min(options.get_max_retries(client.max_retries), RETRIES_BEFORE_NEXT)
            try:
                return await client._ask(cast_to, options.model_copy(update={"max_retries": retries}), settings)
            except openai.APIError as error:
                if not _may_pass(error):
                    raise
        return await clients[-1]._ask(cast_to, options, settings)

    async def _ask(self, cast_to: Any, options: Any, settings: dict[str, Any]) -> Any:
        return await super().request(cast_to, options, **settings)

    def _calculate_retry_timeout(self, *arguments: Any, **settings: Any) -> float:
        if (refusal := current_tries().refusal) is not None:
            raise refusal  # older versions of the library try again whatever was raised
        wait_s: float = super()._calculate_retry_timeout(*arguments, **settings)
        return wait_s * (1 + WAIT_JITTER * random.random())


class EndpointHttpClient(openai.DefaultAsyncHttpxClient):
    """Sends the tries of one endpoint's calls; tells its health, and reads no answer beyond the ceiling."""

    def __init__(self, base_url: str, health: Health, *, uses_proxies: bool, limits: Any, **settings: Any) -> None:
        transport = ModelTransport(_HTTP, base_url, uses_proxies=uses_proxies, limits=limits)
        # No redirects: they would carry headers and prompts to a host that the caller never named.
        super().__init__(transport=cast(Any, transport), follow_redirects=False, cookies=no_cookies(), **settings)
        self._base = base_url
        self._health = health

    async def send(self, request: Any, *, stream: bool = False, **settings: Any) -> Any:
        """Send a request; its answer is read unless it is streamed."""
        tries = current_tries()
        tries.begin(self._base)
        settings["follow_redirects"] = False
        try:
            response = await super().send(request, stream=True, **settings)
            if not stream:
                response = await _read(response)
        except asyncio.CancelledError:
            if tries.time_is_over:  # how an endpoint that hangs shows; other cancels say nothing about it
                self._health.failed()
            raise
        except ModelAddressError as error:
            tries.refusal = error
            raise
        except Exception:
            self._health.failed()
            raise
        if response.status_code >= 500:
            self._health.failed()
        else:
            self._health.answered()
        if response.is_error and not stream:
            tries.last_answer = f"{response.status_code}: {excerpt(response.content)}"
        return response


async def _read(response: Any) -> Any:
    """The same response with its body in memory."""
    body = bytearray()
    try:
        async for piece in response.aiter_raw():  # the transport has unpacked it, piece by piece
            body += piece
            _check_size(body)
    finally:
        await response.aclose()
    return type(response)(
        response.status_code,
        headers=[pair for pair in response.headers.multi_items() if pair[0].lower() not in BODY_HEADERS],
        content=bytes(body),
        request=response.request,
        extensions=response.extensions,
    )


def _check_size(body: bytes | bytearray) -> None:
    if len(body) > MAX_ANSWER_BYTES:
        told = f"the endpoint's answer is over the ceiling of {MAX_ANSWER_BYTES:,} bytes"
        raise InvalidModelResponseError(f"{told}: {excerpt(bytes(body[:MAX_EXCERPT_CHARS]))}")


def _check_headers(headers: Any) -> None:
    """Those that one call adds: ``extra_headers`` in its sampling arguments."""
    given = headers if isinstance(headers, Mapping) else {}
    try:
        if not all(isinstance(name, str) and not isinstance(value, bytes) for name, value in given.items()):
            raise ValueError("names and values are text")
        check_headers((name, value if isinstance(value, str) else "") for name, value in given.items())
    except ValueError as error:
        raise ModelError(f"extra_headers: {error}") from None


def _check_timeout(timeout: Any) -> None:
    """That of one call: ``timeout`` in its sampling arguments. Not a number, or none that a clock can wait for."""
    is_plain = isinstance(timeout, str | list | dict)
    if is_plain or (isinstance(timeout, int | float) and not timeout > 0):
        raise ModelError(f"timeout: {str(timeout)[:100]} is no number of seconds above 0")


def _limit_s(timeout: Any, default_s: float | None) -> float | None:
    """The seconds in a setting of the library: a number, None, a Timeout, or not given."""
    if timeout is None or isinstance(timeout, int | float):
        return timeout
    return cast("float | None", getattr(timeout, "read", default_s))


def _may_pass(error: openai.APIError) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)
