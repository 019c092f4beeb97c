"""Endpoints that answer wrongly, slowly or not at all: typed errors within the client's time, memory bounded."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from typing import Any

import pytest
from bad_endpoint import (
    Act,
    BadEndpoint,
    answer,
    completion,
    cut,
    drip,
    error,
    flood,
    hang,
    hang_after_headers,
    hang_up,
)

from envbus.environments import endpoint_client, resolve_client
from envbus.environments.model_call import ChatResult, chat
from envbus.errors import (
    EmptyModelResponseError,
    InvalidModelResponseError,
    ModelError,
    ModelRateLimitError,
    ModelServerError,
    ModelTimeoutError,
    ModelUnreachableError,
    OverlongPromptError,
)

PROMPT = [{"role": "user", "content": "hi"}]
HTML = b"<html><body>502 Bad Gateway</body></html>"


async def ask(endpoint: BadEndpoint, **settings: Any) -> ChatResult:
    return await chat(resolve_client(endpoint.config(**{"max_retries": 0, **settings})), "m", PROMPT)


def choices(*choices: Any) -> dict[str, Any]:
    return completion() | {"choices": list(choices)}


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (answer(HTML, content_type="text/html"), InvalidModelResponseError),
        (answer(b'{"choices": [{"mess'), InvalidModelResponseError),
        (answer(b""), InvalidModelResponseError),
        (answer({"error": "200, but no"}), InvalidModelResponseError),
        (answer(choices()), InvalidModelResponseError),
        (answer(choices({"index": 0, "message": None})), InvalidModelResponseError),
        (answer(choices({"index": 0})), InvalidModelResponseError),
        (answer(choices({"message": {"role": "assistant", "content": None}})), EmptyModelResponseError),
        (answer(b"not gzip", Content_Encoding="gzip"), InvalidModelResponseError),
        (answer(gzip.compress(b"{}")[:-4], Content_Encoding="gzip"), InvalidModelResponseError),
        (answer(b"{}", Content_Encoding="br"), InvalidModelResponseError),
        (cut, ModelUnreachableError),
        (hang_up, ModelUnreachableError),
        (answer(HTML, status=502, content_type="text/html"), ModelServerError),
        (error(408), ModelServerError),
        (error(409), ModelServerError),
        (error(503), ModelServerError),
        (error(429), ModelRateLimitError),
    ],
)
async def test_a_failure_that_may_pass_has_its_type(endpoint: BadEndpoint, act: Act, kind: type[ModelError]) -> None:
    """P51."""
    endpoint.will(act)
    with pytest.raises(kind) as caught:
        await ask(endpoint)
    assert type(caught.value) is kind
    assert caught.value.retryable


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 422])
async def test_a_refusal_is_final(endpoint: BadEndpoint, status: int) -> None:
    """P30: no retry, not retryable, and the endpoint's words are in it."""
    endpoint.will(error(status, "not for you"))
    with pytest.raises(ModelError, match=rf"{endpoint.url} answered {status} after 1 try.*not for you") as caught:
        await ask(endpoint, max_retries=5)
    assert not caught.value.retryable
    assert len(endpoint.requests) == 1


async def test_an_overlong_prompt_is_final(endpoint: BadEndpoint) -> None:
    """P30 (b)."""
    endpoint.will(error(400, "This model's maximum context length is 8 tokens"))
    with pytest.raises(OverlongPromptError, match="maximum context length is 8") as caught:
        await ask(endpoint, max_retries=5)
    assert not caught.value.retryable
    assert len(endpoint.requests) == 1


async def test_the_content_type_is_of_no_matter(endpoint: BadEndpoint) -> None:
    endpoint.will(answer(content_type="text/plain"))
    assert (await ask(endpoint)).message["content"] == "hello"


async def test_packed_answers_are_unpacked(endpoint: BadEndpoint) -> None:
    endpoint.will(answer(gzip.compress(b'{"choices": [{"message": {"content": "packed"}}]}'), Content_Encoding="gzip"))
    assert (await ask(endpoint)).message["content"] == "packed"


@pytest.mark.parametrize("act", [hang, hang_after_headers, drip])
async def test_an_answer_that_does_not_end_is_ended_by_the_timeout(endpoint: BadEndpoint, act: Act) -> None:
    """P51: one limit for the call, whatever trickles in, however many retries there would be."""
    endpoint.will(act)
    started = time.monotonic()
    with pytest.raises(ModelTimeoutError, match=r"timeout = 0\.4 s") as caught:
        await ask(endpoint, timeout=0.4, max_retries=5)
    assert 0.4 <= time.monotonic() - started < 10
    assert caught.value.retryable


async def test_retries_and_their_waits_count_for_the_timeout(endpoint: BadEndpoint) -> None:
    """P51: an endpoint that asks to wait for long does not hold a rollout longer than the caller said."""
    endpoint.will(answer(), error(429, "later", Retry_After="100"))
    await ask(endpoint)
    with pytest.raises(ModelTimeoutError, match=r"after 1 try in .*the last answer was 429: .*later"):
        await ask(endpoint, timeout=1.5, max_retries=1000)


async def test_a_redirect_is_not_followed_and_the_key_stays(
    endpoint: BadEndpoint, make_endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47, P53: neither headers nor the prompt go to an origin that the caller did not name."""
    monkeypatch.setenv("MY_LLM_KEY", "secret")
    other = make_endpoint()
    for status in (301, 302, 307, 308):
        endpoint.will(answer(b"", status=status, Location=f"{other.url}/chat/completions"))
        with pytest.raises(ModelError, match=f"answered {status}"):
            await ask(endpoint, api_key_var="MY_LLM_KEY")
    assert endpoint.requests[0].headers["Authorization"] == "Bearer secret"
    assert other.requests == []


async def test_other_secrets_of_the_process_are_not_sent(
    endpoint: BadEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47: what the client library would take from the environment by itself."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "secret-2")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway: secret-3")
    await ask(endpoint)
    assert "secret" not in str(endpoint.requests[0].headers)


async def test_an_endless_body_is_cut_off(endpoint: BadEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays within a small multiple of the ceiling, packed bodies included."""
    ceiling = 1_000_000
    monkeypatch.setattr(endpoint_client, "MAX_ANSWER_BYTES", ceiling)
    bomb = gzip.compress(b" " * 50_000_000, compresslevel=1)
    over = "over the ceiling of 1,000,000 bytes"
    for act, told in (
        (flood(b" " * 50_000), over),
        (flood(b"x" * 50_000, first=gzip.compress(b"{}"), Content_Encoding="gzip"), "not a chat completion: {}"),
        (answer(bomb, Content_Encoding="gzip"), over),
    ):
        endpoint.will(act)
        tracemalloc.start()
        try:
            with pytest.raises(InvalidModelResponseError, match=told):
                await ask(endpoint)
            assert tracemalloc.get_traced_memory()[1] < 10 * ceiling
        finally:
            tracemalloc.stop()


async def test_a_cancel_ends_a_call_that_hangs(endpoint: BadEndpoint) -> None:
    endpoint.will(hang)
    call = asyncio.create_task(ask(endpoint))
    async with asyncio.timeout(10):
        await asyncio.to_thread(endpoint.asked.acquire, timeout=10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
